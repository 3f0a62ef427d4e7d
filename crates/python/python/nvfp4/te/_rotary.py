"""Rotary position embeddings under TransformerEngine's names."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ._signature import refuse


class RotaryPositionEmbedding(torch.nn.Module):
    """``transformer_engine.pytorch.RotaryPositionEmbedding``: the angles by which
    :func:`apply_rotary_pos_emb` turns, [positions, 1, 1, features].
    """

    inv_freq: Tensor

    def __init__(
        self, dim: int, rotary_percent: float = 1.0,
        seq_len_interpolation_factor: Optional[int] = None,
        pretrained_max_position_embeddings: Optional[int] = None, rotary_base: float = 10000.0,
        interleaved: bool = False,
    ):  # fmt: skip
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        self.register_buffer(
            "inv_freq", 1.0 / rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        )

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = torch.arange(max_seq_len, device=self.inv_freq.device) + offset
        places = positions.to(self.inv_freq.dtype)
        known, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if known is not None and factor is not None:
            # Beyond what it was trained for, positions are as dense as they have to be.
            places = places / (max_seq_len / known if max_seq_len > known * factor else factor)
        angles = places[:, None] * self.inv_freq  # torch.autocast leaves it in 32 bits
        if self.interleaved:
            return angles.repeat_interleave(2, -1)[:, None, None, :]
        return torch.cat((angles, angles), -1)[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Optional[Tensor] = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: Optional[Tensor] = None,
    cp_size: int = 1, cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """``transformer_engine.pytorch.attention.apply_rotary_pos_emb``.

    ``fused`` computes in 32 bits and rounds once, as the fused kernel does.
    """
    refuse("apply_rotary_pos_emb", "cp_size", cp_size, 1)
    refuse("apply_rotary_pos_emb", "cp_rank", cp_rank, 0)
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("apply_rotary_pos_emb: tensor_format='thd' needs cu_seqlens")
        ends = cu_seqlens.to(t.device, torch.int64)
        of_token = torch.arange(t.shape[0], device=t.device)
        # Tokens beyond the last sequence count as its own.
        sequence = (torch.bucketize(of_token, ends, right=True) - 1).clamp(max=ends.numel() - 2)
        position = of_token - ends[sequence]
        if start_positions is not None:
            position = position + start_positions.to(t.device)[sequence]
        return _turned(
            t, freqs.flatten(0, 2)[position.clamp(max=freqs.shape[0] - 1), None], interleaved, fused
        )
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(
            f"apply_rotary_pos_emb: unknown tensor_format '{tensor_format}'; there are 'sbhd', 'bshd', 'thd'"
        )
    length = t.shape[0 if tensor_format == "sbhd" else 1]
    needed = length if start_positions is None else length + int(start_positions.max())
    if needed > freqs.shape[0]:
        raise ValueError(
            f"apply_rotary_pos_emb: expected angles for {needed} positions, got {freqs.shape[0]}"
        )
    if start_positions is None:
        angles = freqs[:length]
    else:  # [positions, sequences, 1, features]
        position = (
            torch.arange(length, device=t.device)[:, None] + start_positions.to(t.device)[None, :]
        )
        angles = freqs[position, 0]
    return _turned(
        t, angles if tensor_format == "sbhd" else angles.transpose(0, 1), interleaved, fused
    )


def _turned(t: Tensor, angles: Tensor, interleaved: bool, fused: bool) -> Tensor:
    dtype = torch.promote_types(t.dtype, torch.float32) if fused else t.dtype
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turned, rest = t[..., : angles.shape[-1]].to(dtype), t[..., angles.shape[-1] :]
    if interleaved:
        even, odd = turned[..., ::2], turned[..., 1::2]
        quarter = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter = torch.cat((-second, first), -1)
    return torch.cat(((turned * cos + quarter * sin).to(t.dtype), rest), -1)

"""Tokens in the order of their experts, under TransformerEngine's names: by torch's operations, on
any device, and differentiable.
"""

from __future__ import annotations

import warnings
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from nvfp4.torch._routes import tokens_among

from ._recipe import region


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> Tuple[Tensor, Tensor]:
    """``transformer_engine.pytorch.moe_permute``: tokens sorted by expert, and a map for
    :func:`moe_unpermute`.
    """
    if map_type == "index":
        return _permute_by_index(inp, routing_map, num_out_tokens)
    _check_map(map_type)
    output, _, row_id_map = _permute(inp, None, routing_map, num_out_tokens, None)
    return output, row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """``transformer_engine.pytorch.moe_permute_with_probs``."""
    output, permuted, row_id_map = _permute(inp, probs, routing_map, num_out_tokens, None)
    assert permuted is not None
    return output, permuted, row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor], Tensor]:
    """``transformer_engine.pytorch.moe_permute_and_pad_with_probs``: each expert's tokens are padded
    with zeros to a multiple of ``align_size``.
    """
    if align_size <= 0:
        raise ValueError(
            f"moe_permute_and_pad_with_probs: expected a positive align_size, got {align_size}"
        )
    tokens_per_expert = tokens_per_expert.to(inp.device)
    padded = (tokens_per_expert + align_size - 1) // align_size * align_size
    more = padded - tokens_per_expert
    offsets = None if not more.any() else more.cumsum(0) - more
    output, permuted, row_id_map = _permute(inp, probs, routing_map, int(padded.sum()), offsets)
    assert permuted is not None
    return output, permuted, row_id_map, offsets, padded.long()


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Optional[Tensor] = None,
    restore_shape: Any = None, map_type: str = "mask", probs: Optional[Tensor] = None,
    pad_offsets: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """``transformer_engine.pytorch.moe_unpermute``: tokens in their own order, the sum of what their
    experts gave, times ``merging_probs``.
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("moe_unpermute: pass merging_probs, and not probs, its older name")
        warnings.warn("probs is the older name of merging_probs", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    if not inp.numel():
        # Probabilities have gradients, of zeros.
        return inp.clone() if merging_probs is None else inp + 0 * merging_probs.sum().to(inp.dtype)
    if map_type == "index":
        return _unpermute_by_index(inp, row_id_map, merging_probs)
    _check_map(map_type)
    experts = (row_id_map.shape[1] - 1) // 2
    used = torch.arange(experts, device=inp.device) < row_id_map[:, -1:]
    token = used.nonzero()[:, 0]
    row, expert = row_id_map[:, :experts][used].long(), row_id_map[:, experts:-1][used].long()
    if pad_offsets is not None:
        row = row + pad_offsets[expert]
    there = row < inp.shape[0]
    token, row, expert = token[there], row[there], expert[there]
    factor = None if merging_probs is None else merging_probs[token, expert]
    return _sums(
        inp, row, token, factor, inp.shape[0] if restore_shape is None else restore_shape[0]
    )


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """``transformer_engine.pytorch.moe_sort_chunks_by_index``."""
    return inp.index_select(0, _order_of_chunks(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> Tuple[Tensor, Tensor]:
    """``transformer_engine.pytorch.moe_sort_chunks_by_index_with_probs``."""
    order = _order_of_chunks(inp, split_sizes, sorted_index)
    return inp.index_select(0, order), probs.index_select(0, order)


def _check_map(map_type: str) -> None:
    if map_type != "mask":
        raise ValueError(f"unknown map_type '{map_type}'; there are 'mask', 'index'")


def _permute(
    inp: Tensor,
    probs: Optional[Tensor],
    routing_map: Tensor,
    num_out_tokens: int,
    offsets: Optional[Tensor],
) -> Tuple[Tensor, Optional[Tensor], Tensor]:
    routed = routing_map.bool()
    if routed.shape[0] != inp.shape[0]:
        raise ValueError(
            f"routing_map: expected {inp.shape[0]} rows, one for each token, got {routed.shape[0]}"
        )
    expert, token = routed.t().nonzero(as_tuple=True)
    row = torch.arange(token.numel(), device=inp.device)
    row_id_map = _row_id_map(routed, expert, token, row)
    if offsets is not None:
        row = row + offsets[expert]
    there = row < num_out_tokens
    expert, token, row = expert[there], token[there], row[there]
    output = inp.new_zeros(num_out_tokens, *inp.shape[1:]).index_copy(
        0, row, inp.index_select(0, token)
    )
    if probs is None:
        return output, None, row_id_map
    return (
        output,
        probs.new_zeros(num_out_tokens).index_copy(0, row, probs[token, expert]),
        row_id_map,
    )


def _row_id_map(routed: Tensor, expert: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """TransformerEngine's map: for each token the rows of its experts, the last one first, then
    these experts, each list as long as there are experts, and how many there are.
    """
    rows = torch.full(routed.shape, -1, dtype=torch.int64, device=routed.device)
    rows[token, expert] = row
    rows, experts = rows.sort(1, descending=True)
    experts = experts.masked_fill(rows < 0, -1)
    return torch.cat((rows, experts, routed.sum(1, keepdim=True)), 1).int()


def _permute_by_index(inp: Tensor, index: Tensor, num_out_tokens: int) -> Tuple[Tensor, Tensor]:
    tokens, chosen = index.shape
    order = index.flatten().sort(stable=True).indices[: num_out_tokens or None]
    row_id_map = torch.full((chosen, tokens), -1, dtype=torch.int32, device=inp.device)
    row_id_map[order % chosen, order // chosen] = torch.arange(
        order.numel(), dtype=torch.int32, device=inp.device
    )
    return inp.index_select(0, order // chosen), row_id_map.flatten()


def _unpermute_by_index(inp: Tensor, row_id_map: Tensor, probs: Optional[Tensor]) -> Tensor:
    tokens, chosen = (row_id_map.numel(), 1) if probs is None else probs.shape
    rows = row_id_map.reshape(chosen, tokens).long()
    choice, token = (rows >= 0).nonzero(as_tuple=True)
    factor = None if probs is None else probs[token, choice]
    return _sums(inp, rows[choice, token], token, factor, tokens)


def _sums(inp: Tensor, row: Tensor, token: Tensor, factor: Optional[Tensor], tokens: int) -> Tensor:
    """The sums of the rows of each token, in 32 bits at least."""
    dtype = torch.promote_types(inp.dtype, torch.float32)
    rows = inp.index_select(0, row).to(dtype)
    if factor is not None:
        rows = rows * factor.to(dtype)[:, None]
    return rows.new_zeros(tokens, *inp.shape[1:]).index_add(0, token, rows).to(inp.dtype)


def _order_of_chunks(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    sizes = torch.as_tensor(split_sizes).tolist()
    chunks = torch.arange(inp.shape[0], device=inp.device).split(sizes)
    return torch.cat([chunks[number] for number in torch.as_tensor(sorted_index).tolist()])


def alignment() -> int:
    """How many tokens of an expert make whole blocks in the recipe around the call."""
    recipe = region().recipe
    if recipe.name.startswith("custom recipe"):
        return 128  # asking its factory for a spec may change what it answers
    spec = recipe.spec("experts", "input")
    return 128 if spec.startswith("nvfp4") else 32 if spec.startswith("mxfp8") else 16


class _Aligned(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: Optional[int] = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: List[int]) -> List[int]:
        """The numbers of tokens with padding. Without an ``align_size``, the recipe of the first
        call decides.
        """
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"m_splits: expected {self.num_gemms} numbers of tokens, got {len(m_splits)}"
            )
        if self.align_size is None:
            self.align_size = alignment()
        return [-(-tokens // self.align_size) * self.align_size for tokens in m_splits]


class Fp8Padding(_Aligned):
    """``transformer_engine.pytorch.Fp8Padding``: pads each expert's tokens with zeros."""

    def forward(self, inp: Tensor, m_splits: List[int]) -> Tuple[Tensor, List[int]]:
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        x = inp.reshape(-1, inp.shape[-1])
        rows = tokens_among(m_splits, padded, inp.device)
        return x.new_zeros(sum(padded), x.shape[1]).index_copy(0, rows, x), padded


class Fp8Unpadding(_Aligned):
    """``transformer_engine.pytorch.Fp8Unpadding``: takes the padding away."""

    def forward(self, inp: Tensor, m_splits: List[int]) -> Tensor:
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp
        return inp.reshape(-1, inp.shape[-1]).index_select(
            0, tokens_among(m_splits, padded, inp.device)
        )

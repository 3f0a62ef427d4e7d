"""``TransformerLayer`` under TransformerEngine's name."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

from ._linear import amp_dtype
from ._masks import mask_type
from ._mlp import LayerNormMLP
from ._modules import Follows
from ._multihead import MultiheadAttention
from ._norms import LayerNorm, RMSNorm
from ._parallel import ShardsOfParts
from ._signature import supports


class DropPath(torch.nn.Module):
    """Leaves out what a layer adds, for some entries of the first dimension, in training."""

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x / keep * (keep + torch.rand(shape, dtype=x.dtype, device=x.device)).floor()


class TransformerLayer(ShardsOfParts):
    """``transformer_engine.pytorch.TransformerLayer``, with its names of parameters."""

    # What is listed and not used below says nothing about numbers; the
    # settings of user buffers say nothing without ub_tp_comm_overlap.
    @supports(
        "num_gqa_groups", "layernorm_epsilon", "hidden_dropout", "attention_dropout", "init_method",
        "output_layer_init_method", "layer_number", "kv_channels", "self_attn_mask_type",
        "window_size", "bottom_right_diagonal", "enc_dec_attn_mask_type",
        "enc_dec_bottom_right_diagonal", "enc_dec_window_size", "tp_group", "tp_size",
        "params_dtype", "get_rng_state_tracker", "fuse_wgrad_accumulation", "seq_length",
        "micro_batch_size", "sequence_parallel", "apply_residual_connection_post_layernorm",
        "output_layernorm", "parallel_attention_mlp", "layer_type", "drop_path_rate",
        "set_parallel_mode", "fuse_qkv_params", "rotary_pos_interleaved", "zero_centered_gamma",
        "qkv_weight_interleaved", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad",
        "ub_bulk_dgrad", "ub_bulk_wgrad", "bias", "activation", "activation_params",
        "normalization", "device", "attn_input_format", "name", "qk_norm_type", "qk_norm_eps",
        "qk_norm_before_rope", "softmax_type",
    )  # fmt: skip
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int,
        num_gqa_groups: Optional[int] = None, layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1, attention_dropout: float = 0.1, init_method=None,
        output_layer_init_method=None, layer_number: Optional[int] = None,
        kv_channels: Optional[int] = None, self_attn_mask_type: str = "causal",
        window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: Optional[bool] = None,
        enc_dec_window_size: Optional[Tuple[int, int]] = None, tp_group=None, tp_size: int = 1,
        params_dtype: Optional[torch.dtype] = None, get_rng_state_tracker=None,
        fuse_wgrad_accumulation: bool = False, seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None, sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False, output_layernorm: bool = False,
        parallel_attention_mlp: bool = False, layer_type: str = "encoder",
        drop_path_rate: float = 0.0, set_parallel_mode: bool = False, fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False, zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True, ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True, ub_overlap_rs: bool = True, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True, ub_bulk_wgrad: bool = True, bias: bool = True,
        activation: str = "gelu", activation_params: Optional[dict] = None,
        normalization: str = "LayerNorm", device=None, attn_input_format: str = "sbhd",
        name: Optional[str] = None, qk_norm_type: Optional[str] = None, qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False, softmax_type: str = "vanilla",
    ):  # fmt: skip
        super().__init__()
        _fit_together(
            layer_type, parallel_attention_mlp, apply_residual_connection_post_layernorm,
            output_layernorm, fuse_wgrad_accumulation and not fuse_qkv_params,
        )  # fmt: skip
        self.layer_type, self.parallel_attention_mlp, self.output_layernorm = (
            layer_type,
            parallel_attention_mlp,
            output_layernorm,
        )
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.self_attn_mask_type, self.enc_dec_attn_mask_type = (
            mask_type(self_attn_mask_type),
            mask_type(enc_dec_attn_mask_type),
        )
        self.window_size, self.enc_dec_window_size = window_size, enc_dec_window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal
        self.hidden_dropout, self.layer_number, self.name = hidden_dropout, layer_number, name

        def called(part: str) -> Optional[str]:
            return None if name is None else f"{name}.{part}"

        both: Dict[str, Any] = dict(
            init_method=init_method, output_layer_init_method=output_layer_init_method,
            normalization=normalization, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker, params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma, bias=bias, device=device,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            tp_group=tp_group, tp_size=tp_size, sequence_parallel=sequence_parallel,
            set_parallel_mode=set_parallel_mode,
        )  # fmt: skip
        attention: Dict[str, Any] = dict(
            both, kv_channels=kv_channels, attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon, layer_number=layer_number,
            num_gqa_groups=num_gqa_groups, fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved, qkv_format=attn_input_format,
            qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope, softmax_type=softmax_type,
        )  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, input_layernorm=not output_layernorm,
            attention_type="self", return_bias=not parallel_attention_mlp,
            name=called("self_attention"), **attention,
        )  # fmt: skip
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, input_layernorm=True, attention_type="cross",
                attn_mask_type=enc_dec_attn_mask_type, return_bias=True,
                name=called("inter_attention"), **attention,
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon,
            return_bias=not parallel_attention_mlp, activation=activation,
            activation_params=activation_params, name=called("layernorm_mlp"), **both,
        )  # fmt: skip
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if output_layernorm:
            norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization]
            self.layernorm = norm(
                hidden_size,
                layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None,
        self_attn_mask_type: Optional[str] = None, window_size: Optional[Tuple[int, int]] = None,
        bottom_right_diagonal: Optional[bool] = None, encoder_output: Optional[Tensor] = None,
        enc_dec_attn_mask: Any = None, enc_dec_attn_mask_type: Optional[str] = None,
        enc_dec_window_size: Optional[Tuple[int, int]] = None,
        enc_dec_bottom_right_diagonal: Optional[bool] = None,
        is_first_microbatch: Optional[bool] = None, checkpoint_core_attention: bool = False,
        inference_params: Any = None, rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Optional[Tensor] = None,
        alibi_slopes: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
        cu_seqlens_kv: Optional[Tensor] = None, cu_seqlens_q_padded: Optional[Tensor] = None,
        cu_seqlens_kv_padded: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
        max_seqlen_kv: Optional[int] = None, fast_zero_fill: bool = True,
        pad_between_seqs: Optional[bool] = None,
    ) -> Tensor:  # fmt: skip
        if self.layer_type == "decoder" and inference_params is not None:
            raise NotImplementedError(
                "te.TransformerLayer.forward: the argument inference_params is not supported here for a decoder with "
                "cross attention, which keeps nothing from step to step; leave it out"
            )
        x = hidden_states.to(amp_dtype(hidden_states) or hidden_states.dtype).contiguous()
        common: Dict[str, Any] = dict(
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention, inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb, core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_q_padded=cu_seqlens_q_padded,
            max_seqlen_q=max_seqlen_q, pad_between_seqs=pad_between_seqs,
        )  # fmt: skip
        attended = self.self_attention(
            x, attention_mask,
            attn_mask_type=self.self_attn_mask_type if self_attn_mask_type is None else self_attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            cu_seqlens_kv=cu_seqlens_q, cu_seqlens_kv_padded=cu_seqlens_q_padded,
            max_seqlen_kv=max_seqlen_q, **common,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
            return self._added(attended, mlp, x, self.drop_path)
        # With the norm of its input after the rest, if residuals come from there.
        y, bias, *norm = attended
        x = self._added(y, bias, norm[0] if norm else x, self.drop_path)
        if self.layer_type == "decoder":
            corner = enc_dec_bottom_right_diagonal
            y, bias, *norm = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output,
                self.enc_dec_attn_mask_type if enc_dec_attn_mask_type is None else enc_dec_attn_mask_type,
                self.enc_dec_window_size if enc_dec_window_size is None else enc_dec_window_size,
                self.enc_dec_bottom_right_diagonal if corner is None else corner,
                cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_kv=max_seqlen_kv, **common,
            )  # fmt: skip
            x = self._added(y, bias, norm[0] if norm else x, None)
        y, bias, *norm = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
        x = self._added(y, bias, norm[0] if norm else x, self.drop_path)
        return self.layernorm(x) if self.output_layernorm else x

    def reset_fp8_meta_tensors(self) -> None:
        """Begins the scales of delayed scaling of all parts again."""
        for part in self.modules():
            if isinstance(part, Follows):
                part.reset_fp8_meta_tensors()

    def _added(
        self, y: Tensor, bias: Optional[Tensor], residual: Tensor, drop_path: Optional[DropPath]
    ) -> Tensor:
        y = y if bias is None else y + bias
        y = functional.dropout(y, self.hidden_dropout, self.training)
        return residual + (y if drop_path is None else drop_path(y))


def _fit_together(
    layer_type: str, parallel: bool, post: bool, output_norm: bool, fused_parts: bool
) -> None:
    """Refuses settings that contradict each other, as TransformerEngine does."""
    if layer_type not in ("encoder", "decoder"):
        raise ValueError(f"unknown layer_type '{layer_type}'; there are 'encoder', 'decoder'")
    if parallel and (layer_type != "encoder" or post or output_norm):
        raise ValueError(
            "parallel_attention_mlp needs layer_type='encoder', and neither "
            "apply_residual_connection_post_layernorm nor output_layernorm"
        )
    if fused_parts:
        raise ValueError("fuse_wgrad_accumulation needs fuse_qkv_params=True")

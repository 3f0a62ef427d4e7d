"""``MultiheadAttention`` under TransformerEngine's name."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from ._attention import DotProductAttention
from ._handover import gradients_as
from ._linear import LayerNormLinear, Linear
from ._machine import place
from ._norms import L2Normalization, LayerNorm, RMSNorm
from ._parallel import ShardsOfParts, divided, size_of
from ._roles import QuantizerRole
from ._rotary import apply_rotary_pos_emb
from ._signature import supports


class MultiheadAttention(ShardsOfParts):
    """``transformer_engine.pytorch.MultiheadAttention``, with its names of parameters."""

    # What is listed and not used below says nothing about numbers.
    @supports(
        "kv_channels", "attention_dropout", "layernorm_epsilon", "init_method",
        "output_layer_init_method", "layer_number", "attn_mask_type", "window_size",
        "bottom_right_diagonal", "tp_group", "tp_size", "num_gqa_groups", "fuse_wgrad_accumulation",
        "get_rng_state_tracker", "sequence_parallel", "params_dtype", "return_bias",
        "return_layernorm_output", "input_layernorm", "attention_type", "set_parallel_mode",
        "fuse_qkv_params", "zero_centered_gamma", "qkv_weight_interleaved",
        "rotary_pos_interleaved", "bias", "normalization", "device", "qkv_format", "name",
        "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope", "seq_length", "micro_batch_size",
        "softmax_type",
    )  # fmt: skip
    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: Optional[int] = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, init_method=None,
        output_layer_init_method=None, layer_number: Optional[int] = None,
        attn_mask_type: str = "causal", window_size: Optional[Tuple[int, int]] = None,
        bottom_right_diagonal: Optional[bool] = None, tp_group=None, tp_size: int = 1,
        num_gqa_groups: Optional[int] = None, fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker=None, sequence_parallel: bool = False,
        params_dtype: Optional[torch.dtype] = None, return_bias: bool = False,
        return_layernorm_output: bool = False, input_layernorm: bool = False,
        attention_type: str = "self", set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False, zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True, rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, bias: bool = True,
        normalization: str = "LayerNorm", device=None, qkv_format: str = "sbhd",
        name: Optional[str] = None, qk_norm_type: Optional[str] = None, qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False, seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None, softmax_type: str = "vanilla",
    ):  # fmt: skip
        super().__init__()
        if attention_type not in ("self", "cross"):
            raise ValueError(
                f"unknown attention_type '{attention_type}'; there are 'self', 'cross'"
            )
        self.qkv_format, self.attn_mask_type, self.attention_type = (
            qkv_format,
            attn_mask_type,
            attention_type,
        )
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.layer_number = 1 if layer_number is None else layer_number
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.features = kv_channels or hidden_size // num_attention_heads
        # Parts of a weight lie one after another.
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.qk_norm_before_rope, self.name = (
            rotary_pos_interleaved,
            qk_norm_before_rope,
            name,
        )
        of_queries, of_keys = (
            self.features * num_attention_heads,
            self.features * self.num_gqa_groups,
        )

        linear: Dict[str, Any] = dict(
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker, params_dtype=params_dtype, device=device,
            init_method=init_method, bias=bias, tp_group=tp_group, tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            parallel_mode="column" if set_parallel_mode else None,
        )  # fmt: skip
        norm: Dict[str, Any] = dict(
            eps=layernorm_epsilon, normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
        )  # fmt: skip

        def called(part: str) -> Optional[str]:
            return None if name is None else f"{name}.{part}"

        self.q_norm, self.k_norm = _qk_norms(
            qk_norm_type, self.features, qk_norm_eps, device, params_dtype
        )
        if attention_type == "self":
            wide = of_queries + 2 * of_keys
            sizes = (
                None if fuse_qkv_params else {"query": of_queries, "key": of_keys, "value": of_keys}
            )
            if input_layernorm:
                self.layernorm_qkv = LayerNormLinear(
                    hidden_size,
                    wide,
                    parameters_split=sizes,
                    name=called("layernorm_linear_qkv"),
                    **norm,
                    **linear,
                )
            else:
                self.qkv = Linear(
                    hidden_size, wide, parameters_split=sizes, name=called("linear_qkv"), **linear
                )
        else:
            if input_layernorm:
                only = None if fuse_qkv_params else ("query",)
                self.layernorm_query = LayerNormLinear(
                    hidden_size,
                    of_queries,
                    parameters_split=only,
                    name=called("layernorm_linear_q"),
                    **norm,
                    **linear,
                )
            else:
                self.query_layer = Linear(
                    hidden_size, of_queries, name=called("linear_q"), **linear
                )
            both = None if fuse_qkv_params else ("key", "value")
            self.key_value = Linear(
                hidden_size, 2 * of_keys, parameters_split=both, name=called("linear_kv"), **linear
            )
        # What follows is of this worker's heads.
        self.tp_size = size_of(tp_size, tp_group)
        workers = self.tp_size if set_parallel_mode else 1
        heads = divided("MultiheadAttention", "num_attention_heads", num_attention_heads, workers)
        self.num_gqa_groups = divided(
            "MultiheadAttention", "num_gqa_groups", self.num_gqa_groups, workers
        )
        self.num_attention_heads = heads
        self.core_attention = DotProductAttention(
            heads, self.features, num_gqa_groups=self.num_gqa_groups,
            attention_dropout=attention_dropout, qkv_format=qkv_format,
            get_rng_state_tracker=get_rng_state_tracker, layer_number=self.layer_number,
            attention_type=attention_type, softmax_type=softmax_type, name=called("core_attention"),
        )  # fmt: skip
        if place(device) is not None:
            self.core_attention.to(place(device))
        self.core_attention.edges = {
            "o": QuantizerRole("linear", "input", called("proj") or "linear"),
            "dqkv": QuantizerRole("linear", "grad_output", self._first().path),
        }
        linear["init_method"] = output_layer_init_method
        linear["parallel_mode"] = "row" if set_parallel_mode else None
        self.proj = Linear(
            of_queries, hidden_size, return_bias=return_bias, name=called("proj"), **linear
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None,
        encoder_output: Optional[Tensor] = None, attn_mask_type: Optional[str] = None,
        window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
        is_first_microbatch: Optional[bool] = None, checkpoint_core_attention: bool = False,
        inference_params: Any = None, rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Optional[Tensor] = None,
        alibi_slopes: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
        cu_seqlens_kv: Optional[Tensor] = None, cu_seqlens_q_padded: Optional[Tensor] = None,
        cu_seqlens_kv_padded: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
        max_seqlen_kv: Optional[int] = None, fast_zero_fill: bool = True,
        pad_between_seqs: Optional[bool] = None,
    ) -> Any:  # fmt: skip
        # TransformerEngine hands over no gradients of what is turned or normed in between.
        output, gradients = self.core_attention.hands_over(hidden_states.device)
        if self.tp_size > 1:  # their scales are those of some heads
            output, gradients = False, None
        between = rotary_pos_emb is not None or self.q_norm is not None
        with gradients_as(None if between else gradients):
            if self.attention_type == "self":
                q, k, v, norm = self._of_one(hidden_states, is_first_microbatch)
            elif encoder_output is None:
                raise ValueError("MultiheadAttention: attention_type='cross' needs encoder_output")
            else:
                q, k, v, norm = self._of_two(hidden_states, encoder_output, is_first_microbatch)
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            angles = (
                rotary_pos_emb
                if isinstance(rotary_pos_emb, tuple)
                else (rotary_pos_emb, rotary_pos_emb)
            )
            starts = None if inference_params is None else inference_params.get_seqlens_pre_step()
            padded = bool(pad_between_seqs)
            ends = (
                cu_seqlens_q_padded if padded else cu_seqlens_q,
                cu_seqlens_kv_padded if padded else cu_seqlens_kv,
            )
            q, k = (
                apply_rotary_pos_emb(
                    x,
                    freqs,
                    self.qkv_format,
                    starts,
                    self.rotary_pos_interleaved,
                    fused=True,
                    cu_seqlens=cu,
                )
                for x, freqs, cu in zip((q, k), angles, ends)
            )
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        y = self.core_attention(
            q, k, v, attention_mask, self.qkv_format, cu_seqlens_q, cu_seqlens_kv,
            cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            inference_params=inference_params, pad_between_seqs=pad_between_seqs,
            fp8_output=output,
        )  # fmt: skip
        projected = self.proj(y, is_first_microbatch=is_first_microbatch)
        outputs = projected if self.return_bias else (projected,)
        if self.input_layernorm and self.return_layernorm_output:
            outputs += (norm,)
        return outputs if len(outputs) > 1 else outputs[0]

    def _first(self) -> Any:
        """The linear layer before attention; that of the queries, if there are two."""
        names = ("layernorm_qkv", "qkv", "layernorm_query", "query_layer")
        return next(self._modules[name] for name in names if name in self._modules)

    def _normed(
        self, module: LayerNormLinear, x: Tensor, is_first_microbatch: Optional[bool]
    ) -> Tuple[Tensor, Any]:
        made = module(x, is_first_microbatch=is_first_microbatch)
        return made if self.return_layernorm_output else (made, None)

    def _of_one(
        self, x: Tensor, is_first_microbatch: Optional[bool]
    ) -> Tuple[Tensor, Tensor, Tensor, Any]:
        """Queries, keys and values of the same tokens, and the norm."""
        if self.input_layernorm:
            mixed, norm = self._normed(self.layernorm_qkv, x, is_first_microbatch)
        else:
            mixed, norm = self.qkv(x, is_first_microbatch=is_first_microbatch), None
        each = self.num_attention_heads // self.num_gqa_groups  # queries of a key
        tokens = mixed.shape[:-1]  # all of them, where workers have some of x
        if self.qkv_weight_interleaved:  # group by group: its queries, its key, its value
            mixed = mixed.reshape(*tokens, self.num_gqa_groups, each + 2, self.features)
            parts = mixed.split((each, 1, 1), -2)
        else:  # all queries, all keys, all values
            mixed = mixed.reshape(*tokens, each + 2, self.num_gqa_groups, self.features)
            parts = mixed.split((each, 1, 1), -3)
        q, k, v = (part.reshape(*tokens, -1, self.features) for part in parts)
        return q, k, v, norm

    def _of_two(
        self, x: Tensor, encoder: Tensor, is_first_microbatch: Optional[bool]
    ) -> Tuple[Tensor, Tensor, Tensor, Any]:
        """Queries of tokens, keys and values of others, and the norm."""
        both = self.key_value(encoder, is_first_microbatch=is_first_microbatch)
        if self.qkv_weight_interleaved:
            k, v = both.reshape(*both.shape[:-1], self.num_gqa_groups, 2 * self.features).chunk(
                2, -1
            )
        else:
            k, v = both.reshape(*both.shape[:-1], 2 * self.num_gqa_groups, self.features).chunk(
                2, -2
            )
        if self.input_layernorm:
            q, norm = self._normed(self.layernorm_query, x, is_first_microbatch)
        else:
            q, norm = self.query_layer(x, is_first_microbatch=is_first_microbatch), None
        return q.reshape(*q.shape[:-1], self.num_attention_heads, self.features), k, v, norm


def _qk_norms(
    kind: Optional[str], size: int, eps: float, device: Any, dtype: Any
) -> Tuple[Any, Any]:
    """Norms of the queries and keys of each head."""
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        norm = L2Normalization(eps)
        return norm, norm
    kinds = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if kind not in kinds:
        raise ValueError(
            f"unknown qk_norm_type '{kind}'; there are 'L2Normalization', 'RMSNorm', 'LayerNorm'"
        )
    return tuple(kinds[kind](size, eps, device=device, params_dtype=dtype) for _ in range(2))  # type: ignore[return-value]

"""``DotProductAttention`` under TransformerEngine's name, over torch's own attention."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional

import nvfp4
from nvfp4.torch._delayed import Delays, Given, Kept, Scale
from nvfp4.torch._finite import Watched
from nvfp4.torch._formats import plan_of
from nvfp4.torch._kept import captured

from ._attention_recipe import attention_of, local_recipes
from ._float8 import Float8CurrentScalingQuantizer
from ._handover import hand_over
from ._initial import made_real, random_state
from ._masks import (
    BIASES, Padding, alibi, distances, is_bottom_right, mask_type, padding_of_lengths,
    padding_of_mask, seen, window_of,
)  # fmt: skip
from ._modules import Follows, outside_of_graphs
from ._mxfp8 import MXFP8Quantizer
from ._parallel import no_context_parallelism, one_worker
from ._quantized_attention import (
    SLOTS, Attention, AttentionFormats, Codes, check_types, given_of,
)  # fmt: skip
from ._roles import QuantizerRole, handed_to
from ._signature import refuse, supports


class _Packed(NamedTuple):
    """Where the tokens of sequences are that lie one after another."""

    rows: Tensor
    there: Tensor

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, longest: int) -> "_Packed":
        token = torch.arange(longest, device=starts.device)
        return cls(starts[:, None] + token, token < lengths[:, None])

    def apart(self, packed: Tensor) -> Tensor:
        """[tokens, heads, features] as [sequences, tokens, heads, features], with zeros as padding."""
        rows = packed[self.rows.clamp(max=packed.shape[0] - 1)]
        return rows.masked_fill(~self.there[..., None, None], 0)

    def together(self, apart: Tensor, tokens: int) -> Tensor:
        """[sequences, tokens, features] as [tokens, features]."""
        return apart.new_zeros(tokens, apart.shape[-1]).index_copy(
            0, self.rows[self.there], apart[self.there]
        )


class DotProductAttention(Follows, Delays):
    """``transformer_engine.pytorch.DotProductAttention``.

    A query that sees no key gives zeros. Where the recipe around a call quantizes attention, the
    formula is computed step by step (``_quantized_attention.py``), otherwise by torch.
    """

    softmax_offset: Optional[Tensor]
    formats: AttentionFormats
    amax_group = None
    # It has no linear layers.
    _products: List[Tuple] = []
    # Who takes over what it makes: the roles of the slots "o" and "dqkv" where it is handed over.
    edges: Dict[str, QuantizerRole] = {}
    # The flags of tensors that must be finite, on each GPU.
    _flags: Dict[torch.device, Tensor]

    # What is listed and not used below says nothing with one worker.
    @supports(
        "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size",
        "bottom_right_diagonal", "get_rng_state_tracker", "layer_number", "attention_type",
        "softmax_scale", "softmax_type", "return_max_logit", "name", "tp_size", "tp_group",
        "sequence_parallel", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type",
    )  # fmt: skip
    def __init__(
        self, num_attention_heads: int, kv_channels: Union[int, Tuple[int, int]],
        num_gqa_groups: Optional[int] = None, attention_dropout: float = 0.0,
        qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
        sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker=None,
        tp_group=None, layer_number: Optional[int] = None, attention_type: str = "self",
        cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type: str = "p2p",
        softmax_scale: Optional[float] = None, softmax_type: str = "vanilla",
        return_max_logit: bool = False, name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__()
        one_worker("DotProductAttention", tp_size, tp_group)
        no_context_parallelism("DotProductAttention", cp_group)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"num_gqa_groups: expected a divisor of {num_attention_heads} heads, got {num_gqa_groups}"
            )
        if softmax_type not in ("vanilla", "off-by-one", "learnable"):
            raise ValueError(
                f"unknown softmax_type '{softmax_type}'; there are 'vanilla', 'off-by-one', 'learnable'"
            )
        features = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(features) if softmax_scale is None else softmax_scale
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = mask_type(attn_mask_type), window_size
        self.bottom_right_diagonal, self.attention_type = bottom_right_diagonal, attention_type
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        self.layer_number = 1 if layer_number is None else layer_number
        self.softmax_type, self.return_max_logit, self.name = softmax_type, return_max_logit, name
        # The score of a key that is always there and whose value is zero.
        offset = torch.zeros(num_attention_heads) if softmax_type == "learnable" else None
        self.register_parameter(
            "softmax_offset", None if offset is None else torch.nn.Parameter(offset)
        )
        self.path, self._flags = name or "attention", {}
        self.use_recipe("high_precision")

    def use_recipe(self, recipe: Union[str, nvfp4.Recipe]) -> None:
        """Switches to another recipe."""
        with handed_to(self.edges):
            plan = plan_of(recipe, self.sites_of(self, self.path))
        self.formats = AttentionFormats.of(plan, self.path)
        delayed = zip(SLOTS, self.formats.tensors)
        self.keep_each({slot: of.spec for slot, of in delayed if of.delayed}, self._home())

    def weights(self) -> List[str]:
        return []

    def forget_weights(self) -> None:
        """Does nothing: it has no weights."""

    def _groups(self) -> int:
        return 3

    def _recipe_of(self, recipe: Any) -> Any:
        return attention_of(recipe) or recipe

    @property
    def fp8_meta(self) -> Dict[str, Any]:
        """The recipe, the states of both passes, and recipes of the kinds that its tensors have."""
        meta = super().fp8_meta
        if meta["recipe"] is not None:
            quantizers, places = meta["quantizers"]["scaling_fwd"], self._places("forward")
            own = [quantizers[places[slot]] for slot in ("qkv", "s")]
            meta["local_recipes"] = local_recipes(meta["recipe"], own)
        return meta

    def _ask_about_edges(self, recipe: Any) -> None:
        """Asks nothing: O and the gradient of QKV are among the tensors of the recipe."""

    def _places(self, mode: str) -> Dict[str, int]:
        places = {"forward": {"qkv": 2, "o": 3, "s": 8}, "backward": {"dqkv": 0, "do": 3, "dp": 5}}
        return places[mode]

    @classmethod
    def sites_of(cls, module: torch.nn.Module, path: str) -> List[Tuple]:
        """What plans name it if it is at this path."""
        return [(path, "attention")]

    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> List[Optional[QuantizerRole]]:
        """The roles of the tensors of a pass, each several times, as TransformerEngine numbers them.
        Those of the output and of gradients are their readers', or have a name alone.
        """
        name = self.name or ""

        def edge(role: Optional[QuantizerRole], end: str) -> QuantizerRole:
            return role or QuantizerRole(name=f"{name}.{end}" if name else end)

        def inner(tensor: str) -> QuantizerRole:
            return QuantizerRole("dpa", tensor, name)

        if fwd:
            output = edge(self.output_quantizer_role, "dpa_output")
            of = [*[inner("qkv")] * 3, *[output] * 3, *[inner("s")] * 3]
        else:
            gradients = edge(self.grad_input_quantizer_role, "dpa_grad_input")
            of = [*[gradients] * 2, *[inner("do")] * 2, *[inner("dp")] * 2]
        return list(of[:num_quantizers])

    def get_qkv_quantization_capabilities(self) -> Tuple[bool, bool]:
        """Whether queries, keys and values have scales of their own tensors, and whether MXFP8's."""
        self.following()
        quantizer = self.quantizers["scaling_fwd"][self._places("forward")["qkv"]]
        self.__dict__["_qkv_capabilities_quantizer"] = quantizer
        current, blocks = Float8CurrentScalingQuantizer, MXFP8Quantizer
        return isinstance(quantizer, current), isinstance(quantizer, blocks)

    def hands_over(self, device: torch.device) -> Tuple[bool, Optional[Given]]:
        """What the recipe around a call hands over to the linear layers around attention: whether
        its output, and how the gradients of queries, keys and values will have been quantized.
        """
        here = self.following()._on(device)
        output = here._hand_over != "none" and here.formats.hands_over
        of = here.formats.dqkv.whole
        if not output or here._hand_over != "both" or not of.delayed or here.delayed is None:
            return output, None
        kept = here.kept_for("dqkv", of)
        return output, None if kept is None else Given(of.spec, scale=kept.scale)

    def not_finite(self) -> Tuple[Optional[Tensor], List[str]]:
        """The flags on a GPU, if something is watched there, and the tensors that they are for."""
        return next(iter(self._flags.values()), None), [f"{self.path}:{slot}" for slot in SLOTS]

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        """Begins the parameter again, if there is one. On the meta device it becomes real, on
        torch's default device, unless it is deferred.
        """
        if not defer_init and self.softmax_offset is not None:
            made_real(self)
            torch.nn.init.zeros_(self.softmax_offset)

    def set_context_parallel_group(
        self, cp_group, cp_global_ranks, cp_stream, cp_comm_type: str = "p2p"
    ) -> None:
        no_context_parallelism("DotProductAttention.set_context_parallel_group", cp_group)

    def forward(
        self, query_layer: Optional[Tensor] = None, key_layer: Optional[Tensor] = None,
        value_layer: Optional[Tensor] = None, attention_mask: Any = None,
        qkv_format: Optional[str] = None, cu_seqlens_q: Optional[Tensor] = None,
        cu_seqlens_kv: Optional[Tensor] = None, cu_seqlens_q_padded: Optional[Tensor] = None,
        cu_seqlens_kv_padded: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
        max_seqlen_kv: Optional[int] = None, attn_mask_type: Optional[str] = None,
        window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
        checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None,
        fast_zero_fill: bool = True, inference_params: Any = None,
        pad_between_seqs: Optional[bool] = None, fp8_output: bool = False,
        bf16_backward: bool = False, num_splits: Optional[int] = 1, score_mod=None,
        score_mod_bprop=None, score_mod_tensors=None, score_mod_bprop_tensors=None,
        qkv_layer: Optional[Tensor] = None, kv_layer: Optional[Tensor] = None,
        qkv_interleave_dim: int = -3,
    ) -> Any:  # fmt: skip
        for name, value, default in (
            ("bf16_backward", bf16_backward, False), ("num_splits", num_splits, 1),
            ("score_mod", score_mod, None), ("score_mod_bprop", score_mod_bprop, None),
            ("score_mod_tensors", score_mod_tensors, None),
            ("score_mod_bprop_tensors", score_mod_bprop_tensors, None),
        ):  # fmt: skip
            refuse("DotProductAttention.forward", name, value, default)
        if qkv_layer is not None:
            query_layer, key_layer, value_layer = qkv_layer.unbind(qkv_interleave_dim)
        elif kv_layer is not None:
            key_layer, value_layer = kv_layer.unbind(qkv_interleave_dim)
        if query_layer is None or key_layer is None or value_layer is None:
            raise ValueError(
                "DotProductAttention: expected query_layer, key_layer and value_layer, or qkv_layer"
            )
        mask = self.attn_mask_type if attn_mask_type is None else mask_type(attn_mask_type)
        form = self.qkv_format if qkv_format is None else qkv_format
        if form not in ("sbhd", "bshd", "thd"):
            raise ValueError(f"unknown qkv_format '{form}'; there are 'sbhd', 'bshd', 'thd'")
        if core_attention_bias_type not in BIASES:
            raise ValueError(
                f"unknown core_attention_bias_type '{core_attention_bias_type}'; there are {', '.join(BIASES)}"
            )
        lengths: Optional[Tuple[Tensor, Tensor]] = None
        if cu_seqlens_q is not None and cu_seqlens_kv is not None:
            lengths = cu_seqlens_q.diff().long(), cu_seqlens_kv.diff().long()
        cached = inference_params is not None
        if cached:
            if "padding" not in mask:
                raise ValueError(
                    f"inference_params needs attn_mask_type='padding' or 'padding_causal', got '{mask}'"
                )
            mask = {"padding_causal": "padding_causal_bottom_right"}.get(mask, mask)
            key_layer, value_layer, *counts = inference_params.step(
                self.layer_number, key_layer, value_layer, form
            )
            lengths, cu_seqlens_q_padded, attention_mask = (counts[0], counts[1]), None, None
        packed = None
        if form == "thd":
            if lengths is None or "padding" not in mask:
                raise ValueError(
                    f"qkv_format='thd' needs cu_seqlens_q, cu_seqlens_kv and a padding mask, got '{mask}'"
                )
            packed = _packed(lengths[0], cu_seqlens_q_padded, max_seqlen_q)
            q = packed.apart(query_layer)
            if not cached:
                keys = _packed(lengths[1], cu_seqlens_kv_padded, max_seqlen_kv)
                key_layer, value_layer = keys.apart(key_layer), keys.apart(value_layer)
        else:
            q = query_layer.transpose(0, 1) if form == "sbhd" else query_layer
            if form == "sbhd" and not cached:
                key_layer, value_layer = key_layer.transpose(0, 1), value_layer.transpose(0, 1)
        k, v = key_layer.to(q.dtype), value_layer.to(q.dtype)
        sizes, padding = (q.shape[1], k.shape[1]), None
        if "padding" in mask:
            padding = self._padding(attention_mask, lengths, (q.shape[0], *sizes))
        asked = (
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        )
        corner = is_bottom_right(mask, asked)
        window = window_of(mask, self.window_size if window_size is None else window_size)
        visible = seen(mask, window, corner, sizes, padding, attention_mask, q.device)
        bias = None
        if core_attention_bias_type == "alibi":
            bias = alibi(
                alibi_slopes, self.num_attention_heads, distances(sizes, padding, corner, q.device)
            )
        elif core_attention_bias_type != "no_bias":
            if core_attention_bias is None:
                raise ValueError(
                    f"core_attention_bias_type='{core_attention_bias_type}' needs a core_attention_bias"
                )
            before = core_attention_bias_type == "pre_scale_bias"
            bias = core_attention_bias * self.softmax_scale if before else core_attention_bias
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        here = self.following()._on(q.device)
        attend = here._attend_quantized if here.formats.quantizes else here._attend
        if checkpoint_core_attention and torch.is_grad_enabled():
            y, given = torch.utils.checkpoint.checkpoint(
                attend, q, k, v, visible, bias, mask, window, use_reentrant=False,
                # Without dropout nothing is drawn, and a capture cannot look at the state.
                preserve_rng_state=self.attention_dropout > 0 or not captured(q),
            )  # fmt: skip
        else:
            y, given = attend(q, k, v, visible, bias, mask, window)
        y = y.transpose(1, 2).flatten(2)
        if form == "sbhd":
            y = y.transpose(0, 1)
        elif packed is not None:
            y = packed.together(y, query_layer.shape[0])
        y = y.contiguous()
        if fp8_output and given is not None:
            y = hand_over(y, given_of(here.formats, given))
        if not self.return_max_logit:
            return y
        if here.formats.quantizes:
            q, k, _ = here._codes(q, k, v).unseen().operands((q, k, v), "row", ("features",) * 3)
        return y, self._max_logit(q, k, visible, bias)

    def _padding(self, attention_mask: Any, lengths: Any, sizes: Tuple[int, int, int]) -> Padding:
        if attention_mask is not None:
            return padding_of_mask(attention_mask, sizes)
        if lengths is None:
            raise ValueError(
                "a padding mask needs attention_mask, or cu_seqlens_q and cu_seqlens_kv"
            )
        return padding_of_lengths(lengths[0], lengths[1], sizes[1:])

    def _of_all_heads(self, x: Tensor) -> Tensor:
        """Keys or values for each head of the queries, of which some share one."""
        return (
            x.repeat_interleave(self.num_attention_heads // x.shape[1], 1)
            if x.shape[1] != self.num_attention_heads
            else x
        )

    def _sink(self, q: Tensor) -> Tensor:
        """The score of each head that no key has."""
        if self.softmax_offset is None:
            return q.new_zeros(self.num_attention_heads)
        return self.softmax_offset

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Optional[Tensor],
        bias: Optional[Tensor],
        mask: str,
        window: Any,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        k, v = self._of_all_heads(k), self._of_all_heads(v)
        given: List[Optional[Tensor]] = [visible]
        causal = mask == "causal" and window == (-1, 0) and q.shape[2] == k.shape[2]
        blind = None
        if bias is not None or self.softmax_type != "vanilla":
            causal = False
            added = q.new_zeros(1, 1, q.shape[2], k.shape[2]) if bias is None else bias.to(q.dtype)
            if visible is not None:
                added = added.masked_fill(~visible, float("-inf"))
            if self.softmax_type != "vanilla":
                k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
                shape = (added.shape[0], self.num_attention_heads, q.shape[2])
                column = self._sink(q).to(q.dtype).reshape(1, -1, 1, 1).expand(*shape, 1)
                added = torch.cat((added.expand(*shape, -1), column), -1)
            given = [added]
        if visible is not None and not causal and self.softmax_type == "vanilla":
            # Where nothing is seen, everything is, and what comes out is thrown away.
            blind = ~visible.any(-1, keepdim=True)
            assert given[0] is not None
            given = [
                given[0] | blind
                if given[0].dtype == torch.bool
                else given[0].masked_fill(blind, 0.0)
            ]
        dropout = self.attention_dropout if self.training else 0.0
        with random_state(self.get_rng_state_tracker if dropout > 0 else None):
            y = functional.scaled_dot_product_attention(
                q, k, v, None if causal else given[0], dropout, causal, scale=self.softmax_scale
            )
        return (y if blind is None else y.masked_fill(blind, 0.0)), None

    @outside_of_graphs("attention that a recipe quantizes is computed step by step; leave out fp8_dpa")
    def _attend_quantized(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Optional[Tensor],
        bias: Optional[Tensor],
        mask: str,
        window: Any,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """The same in the formats of a recipe, and how the output was quantized."""
        check_types(q, self.path)
        sink = None if self.softmax_type == "vanilla" else self._sink(q)
        dropout = self.attention_dropout if self.training else 0.0
        y, given = Attention.apply(
            q, k, v, bias, sink, visible, self.softmax_scale, dropout,
            self.get_rng_state_tracker if dropout > 0 else None, self._codes(q, k, v),
        )  # fmt: skip
        return self._watched(y), given

    def _on(self, device: torch.device) -> "DotProductAttention":
        """This module with its scales where its tensors are."""
        scales = () if self.delayed is None else self.delayed.children()
        if any(of.scale.device != device for of in scales if isinstance(of, Scale)):
            self.delayed.to(device)  # type: ignore[union-attr]
        return self

    def _codes(self, *tensors: Tensor) -> Codes:
        device = tensors[0].device
        kept: Dict[str, Optional[Kept]] = dict.fromkeys(SLOTS)
        for slot, format in zip(SLOTS, self.formats.tensors):
            kept[slot] = self.kept_for(slot, format)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            kept = {slot: of and of.unseen() for slot, of in kept.items()}
        watched: Dict[str, Optional[Watched]] = dict.fromkeys(SLOTS)
        if self.formats.finite == "refuse":
            flags = None
            if device.type == "cuda":
                none = torch.full((len(SLOTS),), -1, dtype=torch.int64, device=device)
                flags = self._flags.setdefault(device, none)
            watched = {
                slot: Watched(f"{self.path}:{slot}", None if flags is None else flags[at : at + 1])
                for at, slot in enumerate(SLOTS)
            }
        # Evaluation is one worker's own: another may evaluate nothing.
        workers = self._workers if self.training else None  # type: ignore[attr-defined]
        return Codes(self.formats, kept, None if workers is None else workers.group, watched)


    def _max_logit(
        self, q: Tensor, k: Tensor, visible: Optional[Tensor], bias: Optional[Tensor]
    ) -> Tensor:
        """The largest score of each head."""
        scores = q @ self._of_all_heads(k).transpose(-1, -2) * self.softmax_scale
        scores = scores if bias is None else scores + bias.to(scores.dtype)
        scores = scores if visible is None else scores.masked_fill(~visible, float("-inf"))
        return scores.amax((0, 2, 3))


def _packed(lengths: Tensor, padded: Optional[Tensor], longest: Optional[int]) -> _Packed:
    """The places of sequences of these lengths, which begin where ``padded`` says if it is there."""
    starts = lengths.cumsum(0) - lengths if padded is None else padded[:-1].long()
    return _Packed.of(starts, lengths, int(lengths.max()) if longest is None else longest)

"""``P = softmax(Q·Kᵀ·scale + bias)``, ``O = P·V`` with each tensor in its format, and its gradient.

What a plan quantizes is multiplied as what its codes stand for, with sums in binary32:

| product | left | right | sums over |
|---|---|---|---|
| ``Q·Kᵀ`` | qkv | qkv | features |
| ``P·V`` | s | qkv | keys |
| ``dV = Pᵀ·dO`` | s | do | queries |
| ``dP = dO·Vᵀ`` | do | qkv | features |
| ``dQ = dS·K`` | dp | qkv | keys |
| ``dK = dSᵀ·Q`` | dp | qkv | queries |

``dS = P ∘ (dP − Σ P∘dP)`` is dP behind the softmax, which is what products read and what the slot
``dp`` quantizes. Blocks lie along the sum. The backward pass makes the codes of the forward pass
again, from the scales that it had.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

import nvfp4
from nvfp4.torch._composed import amax_of, quantized
from nvfp4.torch._delayed import Given, Kept
from nvfp4.torch._finite import Watched
from nvfp4.torch._formats import Format
from nvfp4.torch._inputs import FLOATS
from nvfp4.torch._once import once

from ._initial import random_state

SLOTS = ("qkv", "s", "o", "do", "dp", "dqkv")
FORWARD = ("qkv", "s", "o")
_FEATURES, _TOKENS = "features", "tokens"


class Slot(NamedTuple):
    """How a tensor of attention is quantized: ``row`` for the pass that makes it, ``column`` for the
    pass after it. ``from_row`` says that the second is made from what the first stands for.
    """

    whole: Format
    row: Format
    column: Format
    from_row: bool

    @classmethod
    def of(cls, quantizer: nvfp4.Quantizer) -> "Slot":
        row, _, column = quantizer.spec.partition(" / ")
        from_row, column = column.endswith(" from row"), column.removesuffix(" from row") or row

        # Tensors are turned so that their rows lie along the sum.
        def along_rows(spec: str) -> Format:
            return Format.of(nvfp4.Quantizer(spec=spec, directions="row"))

        return cls(Format.of(quantizer), along_rows(row), along_rows(column), from_row)


def _has_axes(format: Format) -> bool:
    """Whether codes depend on the axis of the sum: blocks do, one scale per tensor does not."""
    return format.spec.startswith("mxfp8")


class AttentionFormats(NamedTuple):
    """How the tensors of attention are quantized. ``finite`` is as that of linear layers."""

    qkv: Slot
    s: Slot
    o: Slot
    do: Slot
    dp: Slot
    dqkv: Slot
    finite: str

    @classmethod
    def of(cls, plan: nvfp4.Plan, path: str) -> "AttentionFormats":
        slots = {slot: Slot.of(plan.quantizer(path, slot)) for slot in SLOTS}
        return cls(**slots, finite=plan.finite)

    @property
    def tensors(self) -> Tuple[Format, ...]:
        """What it says about each tensor."""
        return tuple(getattr(self, slot).whole for slot in SLOTS)

    @property
    def quantizes(self) -> bool:
        """Whether any tensor is quantized."""
        return any(format.spec != "high-precision" for format in self.tensors)

    @property
    def hands_over(self) -> bool:
        """Whether a linear layer can read the output as it is quantized: blocks lie along tokens or
        features of heads there, and along all features here.
        """
        return not _has_axes(self.o.row) and self.o.row.spec != "high-precision"

    def __str__(self) -> str:
        return ", ".join(f"{slot}={getattr(self, slot).whole.spec}" for slot in SLOTS)


class Codes(NamedTuple):
    """What quantizes the tensors of one call: the formats, the scales that are kept, the workers
    that agree on amaxes, and what must be finite.
    """

    formats: AttentionFormats
    kept: Dict[str, Optional[Kept]]
    group: Any
    watched: Dict[str, Optional[Watched]]

    def unseen(self) -> "Codes":
        """The same for tensors that the step has seen already."""
        forward = {slot: _unseen(self.kept[slot]) for slot in FORWARD}
        return self._replace(kept={**self.kept, **forward})

    def decoded(self, slot: str, x: Tensor, side: str, amax: Optional[Tensor] = None) -> Tensor:
        """What the codes of a matrix stand for, in binary32, with blocks along its rows."""
        of, kept = getattr(self.formats, slot), self.kept[slot]
        if side == "column" and of.from_row:
            x = self.decoded(slot, x, "row")
        format = of.column if side == "column" else of.row
        if not format.delayed:
            kept = None
        elif kept is not None and side == "column" and of.whole.delayed != ("both",):
            kept = Kept(kept.column_scale, kept.column_history)
        elif kept is not None:
            kept = Kept(kept.scale, kept.history)
        x = x.contiguous()
        arrays = quantized(
            x, format, group=self.group, kept=kept, watched=self.watched[slot], amax=amax
        )
        if len(arrays) == 1:  # nothing is quantized
            return arrays[0].float()
        made = nvfp4.QuantTensor.from_parts(format.spec, list(x.shape), row=arrays)
        return made.dequantize(torch.float32)

    def along(self, slot: str, x: Tensor, side: str, axis: str) -> Tensor:
        """A tensor [batch, heads, tokens, features] as a product reads it that sums along an axis."""
        of = getattr(self.formats, slot)
        turn = axis == _TOKENS and _has_axes(of.column if side == "column" else of.row)
        turned = x.transpose(-1, -2) if turn else x
        made = self.decoded(slot, turned.reshape(-1, turned.shape[-1]), side).reshape(turned.shape)
        return made.transpose(-1, -2) if turn else made

    def together(self, slot: str, tensors: Sequence[Tensor], side: str) -> List[Tensor]:
        """Tensors that share a scale."""
        width = math.gcd(*(x.shape[-1] for x in tensors))
        packed = torch.cat([x.reshape(-1, width) for x in tensors])
        made = self.decoded(slot, packed, side).split([x.numel() // width for x in tensors])
        return [part.reshape(x.shape) for part, x in zip(made, tensors)]

    def operands(self, tensors: Sequence[Tensor], side: str, axes: Sequence[str]) -> List[Tensor]:
        """Q, K and V as products read them, each with a sum along an axis."""
        format = self.formats.qkv.column if side == "column" else self.formats.qkv.row
        if not _has_axes(format):
            return self.together("qkv", tensors, side)
        return [self.along("qkv", x, side, axis) for x, axis in zip(tensors, axes)]

    def joined(self, slot: str, x: Tensor, amax: Optional[Tensor] = None) -> Tensor:
        """What leaves attention, [batch, heads, tokens, features], with the heads of a token side by
        side.
        """
        batch, heads, tokens, features = x.shape
        rows = x.transpose(1, 2).reshape(batch * tokens, heads * features)
        made = self.decoded(slot, rows, "row", amax).to(x.dtype)
        return made.reshape(batch, tokens, heads, features).transpose(1, 2)


class Scores(NamedTuple):
    """What probabilities are made from beside Q and K."""

    scale: float
    visible: Optional[Tensor]
    bias: Optional[Tensor]
    # The score of a key that is always there, [heads]; None where there is none.
    sink: Optional[Tensor]

    def probabilities(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """The probabilities of all keys, and that of the sink."""
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.bias is not None:
            scores = scores + self.bias.float()
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible, float("-inf"))
        if self.sink is None:
            p = scores.softmax(-1)
            if self.visible is not None:
                p = p.masked_fill(~self.visible.any(-1, keepdim=True), 0.0)
            return p, None
        column = self.sink.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        p = torch.cat((scores, column), -1).softmax(-1)
        return p[..., :-1], p[..., -1:]


def _shared(x: Tensor, heads: int) -> Tensor:
    """Keys or values for each head of the queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """The reverse for gradients."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


class Attention(torch.autograd.Function):
    """Attention of Q [batch, heads, tokens, features], K and V [batch, groups, keys, features].

    Gives O, and how it was quantized: its scale, or its amax.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, visible, scale, dropout, tracker, codes):
        with torch.autocast(q.device.type, enabled=False):
            of_forward = {slot: _as_it_is(codes.kept[slot]) for slot in FORWARD}
            codes = codes._replace(kept={**codes.kept, **of_forward})
            scores = Scores(scale, visible, bias, sink)
            qd, kd, vd = codes.operands((q, k, v), "row", (_FEATURES, _FEATURES, _TOKENS))
            p, _ = scores.probabilities(qd, _shared(kd, q.shape[1]))
            drop = None
            if dropout > 0:
                with random_state(tracker):
                    drop = torch.rand(p.shape, device=p.device) >= dropout
            s = codes.along("s", _dropped(p, drop, dropout), "row", _FEATURES)
            y, amax = (s @ _shared(vd, q.shape[1])).to(q.dtype), None
            if "tensor" in codes.formats.o.row.shared:
                amax = amax_of(y)
                if codes.group is not None:
                    largest = torch.distributed.ReduceOp.MAX
                    torch.distributed.all_reduce(amax, largest, group=codes.group)
            y = codes.joined("o", y, amax)
        ctx.save_for_backward(q, k, v, bias, sink, visible, drop)
        ctx.settings = scale, dropout, codes
        given = amax if codes.kept["o"] is None else codes.kept["o"].scale
        if given is not None:
            given = given.clone()
            ctx.mark_non_differentiable(given)
        return y, given

    @staticmethod
    def backward(ctx, d_o, _):
        return _gradients(ctx, d_o)


@once
def _gradients(ctx, d_o):
    q, k, v, bias, sink, visible, drop = ctx.saved_tensors
    scale, dropout, codes = ctx.settings
    heads, groups = q.shape[1], k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        again = codes.unseen()
        # What the forward pass made, as this pass reads it.
        qf, kf, vf = again.operands((q, k, v), "column", (_FEATURES, _FEATURES, _FEATURES))
        p, of_sink = Scores(scale, visible, bias, sink).probabilities(qf, _shared(kf, heads))
        s = again.along("s", _dropped(p, drop, dropout), "column", _TOKENS)
        qt, kt = qf, kf
        if _has_axes(codes.formats.qkv.column):
            qt, kt, _ = again.operands((q, k, v), "column", (_TOKENS, _TOKENS, _FEATURES))
        dv = s.transpose(-1, -2) @ codes.along("do", d_o, "row", _TOKENS)
        dp = codes.along("do", d_o, "row", _FEATURES) @ _shared(vf, heads).transpose(-1, -2)
        dp = _dropped(dp, drop, dropout)
        total = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - total)
        dq = codes.along("dp", ds, "row", _FEATURES) @ _shared(kt, heads) * scale
        dk = codes.along("dp", ds, "row", _TOKENS).transpose(-1, -2) @ qt * scale
        found = [dq.to(q.dtype), _summed(dk, groups).to(k.dtype), _summed(dv, groups).to(v.dtype)]
        if _has_axes(codes.formats.dqkv.row):
            found = [codes.joined("dqkv", x) for x in found]
        else:
            together = codes.together("dqkv", found, "row")
            found = [made.to(x.dtype) for made, x in zip(together, found)]
        of_bias = of_offset = None
        if bias is not None and ctx.needs_input_grad[3]:
            of_bias = ds.sum_to_size(bias.shape).to(bias.dtype)
        if of_sink is not None and ctx.needs_input_grad[4]:
            of_offset = -(of_sink * total).sum((0, 2, 3)).to(sink.dtype)
    return (*found, of_bias, of_offset, None, None, None, None, None)


def _unseen(kept: Optional[Kept]) -> Optional[Kept]:
    return None if kept is None else kept.unseen()


def _as_it_is(kept: Optional[Kept]) -> Optional[Kept]:
    """The same with the scales of now, which a later step may change before the backward pass."""
    if kept is None:
        return None
    scale, column = (None if x is None else x.clone() for x in (kept.scale, kept.column_scale))
    return kept._replace(scale=scale, column_scale=column)


def _dropped(x: Tensor, drop: Optional[Tensor], dropout: float) -> Tensor:
    return x if drop is None else torch.where(drop, x / (1.0 - dropout), 0.0)


def check_types(q: Tensor, path: str) -> None:
    """Refuses what quantizers do not read."""
    if q.dtype not in FLOATS:
        raise TypeError(
            f"{path}: expected query_layer in float32, bfloat16 or float16, got {q.dtype}; cast it, "
            "as with query_layer.to(torch.float32)"
        )


def given_of(formats: AttentionFormats, made: Optional[Tensor]) -> Optional[Given]:
    """How the output was quantized, for a linear layer; None if it reads no such codes."""
    if made is None or not formats.hands_over:
        return None
    spec = formats.o.whole.spec
    return Given(spec, scale=made) if formats.o.whole.delayed else Given(spec, amax=made)

"""``y = x·wᵀ + bias`` with each operand in its format, and its gradient.

| product | reads | and |
|---|---|---|
| forward, ``y = x·wᵀ`` | x, row | w, row |
| ``dx = dy·w`` | dy, row | w, column |
| ``dw = dyᵀ·x`` | dy, column | x, column |
"""

from __future__ import annotations

from typing import Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

from . import _ops  # noqa: F401  (makes the operations known)
from ._delayed import Kept, State
from ._finite import Watch, Watched
from ._formats import Format, Formats

quantize = torch.ops.nvfp4.quantize
quantize_delayed = torch.ops.nvfp4.quantize_delayed
matmul = torch.ops.nvfp4.matmul


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    formats: Formats,
    seed: int = 0,
    group=None,
    state: State = State(),
    watch: Watch = Watch(),
) -> Tensor:
    """The product of a linear layer.

    ``group`` is the process group whose workers agree on amaxes, if any.
    """
    check_features(x, weight.shape[1])
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    tokens = x.reshape(-1, x.shape[-1])
    count = tokens.shape[0]
    padding = -count % formats.alignment
    if padding:
        tokens = functional.pad(tokens, (0, 0, 0, padding))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        # Drawn from torch's own generator, so that a recomputed forward pass draws the same, and a
        # replayed graph afresh.
        stochastic = formats.grad_output.rounding == "stochastic"
        offset = torch.randint(2**62, (1,), device=x.device) if stochastic else None
        y = _Linear.apply(tokens, weight, bias, offset, formats, seed, group, state, watch)
    else:
        unseen = State(*(kept and kept.unseen() for kept in state))
        y = _forward(tokens, weight, bias, formats, (formats.input_row, formats.weight_row), group, unseen, watch)[0]
    if padding:
        y = y[:count]
    return shaped(y, (*x.shape[:-1], weight.shape[0]))


def shaped(y: Tensor, shape: Tuple[int, ...]) -> Tensor:
    """A result in another shape that is no view of anything, as that of ``torch.nn.Linear``: hooks
    on it survive operations in place.
    """
    return torch.ops.aten._unsafe_view(y, shape)


def check_features(x: Tensor, expected: int) -> None:
    """Refuses an input that a layer does not take."""
    if x.shape[-1] != expected:
        raise ValueError(f"the input has {x.shape[-1]} features, this layer takes {expected}")


def _quantized(
    x: Tensor,
    format: Format,
    seed: int = 0,
    offset: Optional[Tensor] = None,
    group=None,
    kept: Optional[Kept] = None,
    watched: Optional[Watched] = None,
) -> List[Tensor]:
    """The arrays of ``x``, with amaxes that all workers agree on.

    Those of delayed scaling, for which something is kept, they agree on later.
    """
    if format.rounding == "stochastic" and offset is None:
        offset = torch.randint(2**62, (1,), device=x.device)
    if format.rounding != "stochastic":
        offset = None
    if format.spec == "high-precision":
        watched = None  # what is in it reaches the result
    name = "" if watched is None else watched.name

    def arrays(made: List[Tensor]) -> List[Tensor]:
        """What an operation made, without the flag at its end."""
        if watched is None:
            return made
        watched.note(made[-1])
        return made[:-1]

    if kept is not None:
        given = (format.spec, format.directions, seed, offset, kept.scale, kept.column_scale, name)
        return kept.note(arrays(quantize_delayed(x, *given)))
    if group is None or format.shared == ("nothing", "nothing"):
        return arrays(quantize(x, format.spec, format.directions, seed, offset, None, None, name))
    if format.spec.endswith(" from row") and ("tensor" in format.shared or "nothing" not in format.shared):
        raise ValueError(f"{format.spec}: workers cannot agree on an amax of decoded values; leave out 'from row'")
    parts: List[Tensor] = []
    if "stored" in format.shared:
        parts = arrays(quantize(x, format.spec, format.directions, seed, offset, None, None, name))
    ends = (format.row, format.row + format.column)
    amaxes = [
        {"stored": lambda: parts[end - 1].clone(), "tensor": lambda: _amax(x), "nothing": lambda: None}[shared]()
        for shared, end in zip(format.shared, ends)
    ]
    for amax in amaxes:
        if amax is not None:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return arrays(quantize(x, format.spec, format.directions, seed, offset, *amaxes, name))


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude, NaN left out; 0 of nothing."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.detach().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax().float().reshape(1)


def _watched(finite: str, watch: Watch, slot: str) -> Optional[Watched]:
    return watch.of(slot) if finite == "refuse" else None


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    formats: Formats,
    pair: Tuple[Format, Format],
    group,
    state: State,
    watch: Watch,
):
    (x_format, w_format), finite = pair, formats.finite
    xq = _quantized(x, x_format, group=group, kept=state.input, watched=_watched(finite, watch, "input"))
    wq = _quantized(weight, w_format, kept=state.weight, watched=_watched(finite, watch, "weight"))
    y = matmul(
        xq[: x_format.row], x_format.spec, "row", x.shape,
        wq[: w_format.row], w_format.spec, "row", weight.shape,
        bias, x.dtype, formats.accumulators[0],
    )  # fmt: skip
    return y, xq, wq


def _once(gradients: Callable[..., Tuple]) -> Callable[..., Tuple]:
    """Makes gradients of gradients an error.

    ``once_differentiable`` does so only where ``dy`` has a graph, but dx depends on the weight too:
    a penalty on it would silently be a constant.
    """

    def backward(ctx, dy):
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # create_graph=True
        with torch.no_grad():
            found = gradients(ctx, dy)
        if not again:
            return found
        # They depend on everything that this product does.
        depends = [*_leaves(ctx), *([dy] if dy.requires_grad else [])]
        text = b"gradients of gradients: the product of a quantized layer is differentiated once only; leave it in torch.nn.Linear"
        raises = torch._C._functions.DelayedError(text, len(found) + len(depends))
        marked = raises(*(None if g is None else g.detach().requires_grad_() for g in found), *depends)
        return marked[: len(found)]

    return backward


def _leaves(node) -> List[Tensor]:
    """The tensors at the beginning of a graph."""
    leaves, seen, nodes = [], set(), [node]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = [next for next, _ in node.next_functions if next is not None and next not in seen]
        seen.update(following)
        nodes += following
    return leaves


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offset, formats, seed, group, state, watch):
        y, xq, wq = _forward(
            x, weight, bias, formats, (formats.input, formats.weight), group, state, watch
        )
        # What the backward pass reads: the column direction, or the numbers themselves where both
        # directions share them.
        xq = xq[formats.input.row :] if formats.input.column else xq
        wq = wq[formats.weight.row :] if formats.weight.column else wq
        ctx.save_for_backward(offset, *xq, *wq)
        ctx.x_arrays = len(xq)
        ctx.shapes = (x.shape, weight.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.settings = (formats, seed, group, state, watch)
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        formats, seed, group, state, watch = ctx.settings
        x_shape, w_shape = ctx.shapes
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        offset, *arrays = ctx.saved_tensors
        xq, wq = arrays[: ctx.x_arrays], arrays[ctx.x_arrays :]
        format = formats.grad_output
        row, column = [], []
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            watched = _watched(formats.finite, watch, "grad_output")
            dyq = _quantized(dy.contiguous(), format, seed, offset, group, state.grad_output, watched)
            row, column = dyq[: format.row], dyq[format.row :] if format.column else dyq
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = matmul(
                row, format.spec, "row", dy.shape, wq, formats.weight.spec, "column", w_shape, None, x_dtype,
                formats.accumulators[1],
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            dw = matmul(
                column, format.spec, "column", dy.shape, xq, formats.input.spec, "column", x_shape, None, w_dtype,
                formats.accumulators[2],
            )  # fmt: skip
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None, None, None, None

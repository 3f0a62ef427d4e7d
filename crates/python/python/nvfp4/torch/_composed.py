"""``y = x·wᵀ + bias`` and its gradient, from an operation for each tensor and one for each product.

So compute layers whose formats leave a direction in high precision, whose input or weight is
rounded stochastically, or whose workers agree on amaxes between the operations. All others compute
a pass in one operation, with the same numbers (``_function.py``).
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from . import _ops  # noqa: F401  (makes the operations known)
from ._delayed import Kept, State
from ._finite import Watch, Watched
from ._formats import Format, Formats
from ._main_grad import dtype_of, settled
from ._once import once
from ._sizes import padded

quantize = torch.ops.nvfp4.quantize
quantize_delayed = torch.ops.nvfp4.quantize_delayed
matmul = torch.ops.nvfp4.matmul


def quantized(
    x: Tensor,
    format: Format,
    seed: int = 0,
    offset: Optional[Tensor] = None,
    group=None,
    kept: Optional[Kept] = None,
    watched: Optional[Watched] = None,
    alignment: int = 1,
    amax: Optional[Tensor] = None,
) -> List[Tensor]:
    """The arrays of ``x``, padded to whole blocks, with amaxes that all workers agree on: this one,
    if it is given.

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
        given = (format.spec, format.directions, seed, offset, kept.scale, kept.column_scale, name, alignment)
        made = arrays(quantize_delayed(x, *given))
        end = len(made) - kept.number()
        kept.note(made, end)
        return made[:end]
    if group is None or amax is not None or format.shared == ("nothing", "nothing"):
        return arrays(quantize(x, format.spec, format.directions, seed, offset, amax, None, name, alignment))
    if format.spec.endswith(" from row") and ("tensor" in format.shared or "nothing" not in format.shared):
        raise ValueError(f"{format.spec}: workers cannot agree on an amax of decoded values; leave out 'from row'")
    parts: List[Tensor] = []
    if "stored" in format.shared:
        parts = arrays(quantize(x, format.spec, format.directions, seed, offset, None, None, name, alignment))
    ends = (format.row, format.row + format.column)
    amaxes = [
        {"stored": lambda: parts[end - 1].clone(), "tensor": lambda: amax_of(x), "nothing": lambda: None}[shared]()
        for shared, end in zip(format.shared, ends)
    ]
    for amax in amaxes:
        if amax is not None:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return arrays(quantize(x, format.spec, format.directions, seed, offset, *amaxes, name, alignment))


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, NaN left out; 0 of nothing."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.detach().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax().float().reshape(1)


def _watched(finite: str, watch: Watch, slot: str) -> Optional[Watched]:
    return watch.of(slot) if finite == "refuse" else None


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    formats: Formats,
    pair: Tuple[Format, Format],
    group,
    state: State,
    watch: Watch,
    amax: Optional[Tensor] = None,
):
    (x_format, w_format), finite = pair, formats.finite
    watched = _watched(finite, watch, "input")
    xq = quantized(
        x, x_format, group=group, kept=state.input, watched=watched, alignment=formats.alignment, amax=amax
    )
    wq = quantized(weight, w_format, kept=state.weight, watched=_watched(finite, watch, "weight"))
    y = matmul(
        xq[: x_format.row], x_format.spec, "row", _whole(x, formats),
        wq[: w_format.row], w_format.spec, "row", weight.shape,
        bias, x.dtype, formats.accumulators[0], x.shape[0],
    )  # fmt: skip
    return y, xq, wq


def _whole(x: Tensor, formats: Formats) -> Tuple[int, int]:
    """The shape of a matrix with its tokens in whole blocks."""
    return padded(x.shape[0], formats.alignment), x.shape[1]


class Composed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offset, formats, seed, group, state, watch, main=None, amax=None, later=None):
        pair = formats.input, formats.weight
        y, xq, wq = forward(x, weight, bias, formats, pair, group, state, watch, amax)
        # What the backward pass reads: the column direction, or the numbers themselves where both
        # directions share them.
        xq = xq[formats.input.row :] if formats.input.column else xq
        wq = wq[formats.weight.row :] if formats.weight.column else wq
        ctx.save_for_backward(offset, *xq, *wq)
        ctx.x_arrays = len(xq)
        ctx.shapes = (_whole(x, formats), weight.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.settings = (formats, seed, group, state, watch)
        ctx.main, ctx.later = main, later
        return y

    @staticmethod
    @once
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
            given = (format, seed, offset, group, state.grad_output, watched, formats.alignment)
            dyq = quantized(dy.contiguous(), *given)
            row, column = dyq[: format.row], dyq[format.row :] if format.column else dyq
        dx = dw = db = None
        dy_shape = _whole(dy, formats)
        if ctx.needs_input_grad[0]:
            dx = matmul(
                row, format.spec, "row", dy_shape, wq, formats.weight.spec, "column", w_shape, None, x_dtype,
                formats.accumulators[1], dy.shape[0],
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            dtype, sums = dtype_of(ctx.main, w_dtype), formats.accumulators[2]
            dw = settled(ctx.main, ctx.later, lambda: matmul(
                column, format.spec, "column", dy_shape, xq, formats.input.spec, "column", x_shape,
                None, dtype, sums,
            ))  # fmt: skip
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None, None, None, None, None, None, None

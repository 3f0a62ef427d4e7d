"""``y = x·wᵀ + bias`` and its gradient, from an operation for each tensor and one for each product.

So compute layers whose formats leave a direction in high precision, whose input or weight is
rounded stochastically, or whose workers agree on amaxes between the operations. All others compute
a pass in one operation, with the same numbers (``_function.py``).
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _ops  # noqa: F401  (makes the operations known)
from ._agree import Part, Split, agreed, agreeing, amax_of  # noqa: F401  (the last is for others)
from ._blocks import parts_of
from ._delayed import Kept, State
from ._finite import Watch, Watched
from ._formats import Format, Formats
from ._main_grad import dtype_of, settled
from ._once import once
from ._quantized import CodedWeight, coded as coded_of
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
    if it is given. ``group`` is that of workers with other rows, or a :class:`Split`.

    Those of delayed scaling, for which something is kept, they agree on later.
    """
    part = part_of(x, format, seed, offset, group, kept, watched, alignment, amax)
    return part.quantize(*agreed([part])[0]) if group is not None else part.quantize(None, None)


def quantizing(part: Part) -> Callable[[], List[Tensor]]:
    """The arrays of a tensor whose workers agree while other work goes on."""
    amaxes = agreeing([part])
    return lambda: part.quantize(*amaxes()[0])


def part_of(
    x: Tensor,
    format: Format,
    seed: int = 0,
    offset: Optional[Tensor] = None,
    group=None,
    kept: Optional[Kept] = None,
    watched: Optional[Watched] = None,
    alignment: int = 1,
    amax: Optional[Tensor] = None,
) -> Part:
    """A tensor that is to be quantized, as :func:`quantized` does it."""
    offset, watched = _drawn(x, format, offset), _seen(format, watched)
    split = Split.of(group if kept is None and amax is None else None)
    part = _part(x, format, seed, offset, split, watched, alignment)
    if kept is not None:
        return part._replace(quantize=lambda *_: _delayed(x, format, seed, offset, kept, watched, alignment))
    return part if amax is None else part._replace(quantize=lambda *_: part.quantize(amax, None))


def _delayed(
    x: Tensor, format: Format, seed: int, offset: Optional[Tensor], kept: Kept, watched: Optional[Watched], alignment: int
) -> List[Tensor]:
    """The arrays by scales of earlier steps, and amaxes for those to come."""
    name = "" if watched is None else watched.name
    given = (format.spec, format.directions, seed, offset, kept.scale, kept.column_scale, name, alignment)
    noted = _arrays(quantize_delayed(x, *given), watched)
    end = len(noted) - kept.number()
    kept.note(noted, end)
    return noted[:end]


def quantized_together(
    xs: Sequence[Tensor],
    formats: Sequence[Format],
    seed: int,
    offsets: Sequence[Optional[Tensor]],
    split: Split,
    watched: Sequence[Optional[Watched]],
    alignment: int,
) -> List[List[Tensor]]:
    """The arrays of several tensors, whose amaxes workers agree on together."""
    parts = [
        _part(x, format, seed, _drawn(x, format, offset), split, _seen(format, watch), alignment)
        for x, format, offset, watch in zip(xs, formats, offsets, watched)
    ]
    return [part.quantize(*amaxes) for part, amaxes in zip(parts, agreed(parts))]


def _part(
    x: Tensor, format: Format, seed: int, offset: Optional[Tensor], split: Split, watched: Optional[Watched], alignment: int
) -> Part:
    name = "" if watched is None else watched.name

    def made(*amaxes: Optional[Tensor]) -> List[Tensor]:
        given = (format.spec, format.directions, seed, offset, *amaxes, name, alignment)
        return _arrays(quantize(x, *given), watched)

    return Part(x, format, split, made)


def _drawn(x: Tensor, format: Format, offset: Optional[Tensor]) -> Optional[Tensor]:
    """Where random numbers begin, if there are any."""
    if format.rounding != "stochastic":
        return None
    return torch.randint(2**62, (1,), device=x.device) if offset is None else offset


def _seen(format: Format, watched: Optional[Watched]) -> Optional[Watched]:
    # What is in a tensor that is not quantized reaches the result.
    return None if format.spec == "high-precision" else watched


def _arrays(made: List[Tensor], watched: Optional[Watched]) -> List[Tensor]:
    """What an operation made, without the flag at its end."""
    if watched is None:
        return made
    watched.note(made[-1])
    return made[:-1]


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
    # Workers agree on x while this one quantizes the weight.
    agreed_x = quantizing(part_of(
        x, x_format, group=group, kept=state.input, watched=watched, alignment=formats.alignment, amax=amax
    ))  # fmt: skip
    coded = coded_of(weight)
    if coded is None:
        wq = quantized(weight, w_format, kept=state.weight, watched=_watched(finite, watch, "weight"))
    else:
        wq = arrays_of(coded, w_format.directions)
    xq = agreed_x()
    y = matmul(
        xq[: x_format.row], x_format.spec, "row", _whole(x, formats),
        wq[: w_format.row], w_format.spec, "row", weight.shape,
        bias, x.dtype, formats.accumulators[0], x.shape[0],
    )  # fmt: skip
    return y, xq, wq


def arrays_of(weight: CodedWeight, directions: str) -> List[Tensor]:
    """The arrays of a weight that is there as codes."""
    sides = [("row", weight.codes.row), ("column", weight.codes.column)]
    return [
        part
        for side, block in sides[: 1 if directions == "row" else 2]
        if block is not None
        for part in parts_of(block, weight.spec, side, weight.matrix)
    ]


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
        format, dx, dw, db = formats.grad_output, None, None, None
        row, column, agreed_dy = [], [], None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            watched = _watched(formats.finite, watch, "grad_output")
            given = (format, seed, offset, group, state.grad_output, watched, formats.alignment)
            agreed_dy = quantizing(part_of(dy.contiguous(), *given))
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        if agreed_dy is not None:
            dyq = agreed_dy()
            row, column = dyq[: format.row], dyq[format.row :] if format.column else dyq
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
        return dx, dw, db, None, None, None, None, None, None, None, None, None

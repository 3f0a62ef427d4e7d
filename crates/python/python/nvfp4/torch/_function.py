"""``y = x·wᵀ + bias`` with each operand in its format, and its gradient.

| product | reads | and |
|---|---|---|
| forward, ``y = x·wᵀ`` | x, row | w, row |
| ``dx = dy·w`` | dy, row | w, column |
| ``dw = dyᵀ·x`` | dy, column | x, column |
"""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import Tensor
from torch.nn import functional

from . import _ops  # noqa: F401  (makes the operations known)
from ._delayed import Kept, State
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
) -> Tensor:
    """The product of a linear layer. ``group`` is the process group whose workers agree on amaxes, if any."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    tokens = x.reshape(-1, x.shape[-1])
    count = tokens.shape[0]
    padding = -count % formats.alignment
    if padding:
        tokens = functional.pad(tokens, (0, 0, 0, padding))
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        # Drawn from torch's own generator, so that a recomputed forward pass draws the same, and a replayed graph afresh.
        stochastic = formats.grad_output.rounding == "stochastic"
        offset = torch.randint(2**62, (1,), device=x.device) if stochastic else None
        y = _Linear.apply(tokens, weight, bias, offset, formats, seed, group, state)
    else:
        unseen = State(*(kept and kept.unseen() for kept in state))
        y = _forward(tokens, weight, bias, formats.input_row, formats.weight_row, group, unseen)[0]
    if padding:
        y = y[:count]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _quantized(
    x: Tensor,
    format: Format,
    seed: int = 0,
    offset: Optional[Tensor] = None,
    group=None,
    kept: Optional[Kept] = None,
) -> List[Tensor]:
    """The arrays of ``x``, with amaxes that all workers agree on. Those of delayed scaling, for which something is kept, they agree on later."""
    if format.rounding == "stochastic" and offset is None:
        offset = torch.randint(2**62, (1,), device=x.device)
    if format.rounding != "stochastic":
        offset = None
    if kept is not None:
        return kept.note(
            quantize_delayed(x, format.spec, format.directions, seed, offset, kept.scale, kept.column_scale)
        )
    if group is None or format.shared == ("nothing", "nothing"):
        return quantize(x, format.spec, format.directions, seed, offset, None, None)
    if format.spec.endswith(" from row") and ("tensor" in format.shared or "nothing" not in format.shared):
        raise ValueError(f"{format.spec}: workers cannot agree on an amax of decoded values; leave out 'from row'")
    parts: List[Tensor] = []
    if "stored" in format.shared:
        parts = quantize(x, format.spec, format.directions, seed, offset, None, None)
    ends = (format.row, format.row + format.column)
    amaxes = [
        {"stored": lambda: parts[end - 1].clone(), "tensor": lambda: _amax(x), "nothing": lambda: None}[shared]()
        for shared, end in zip(format.shared, ends)
    ]
    for amax in amaxes:
        if amax is not None:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return quantize(x, format.spec, format.directions, seed, offset, *amaxes)


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude, NaN left out; 0 of nothing."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.detach().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax().float().reshape(1)


def _forward(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], x_format: Format, w_format: Format, group, state: State
):
    xq = _quantized(x, x_format, group=group, kept=state.input)
    wq = _quantized(weight, w_format, kept=state.weight)
    y = matmul(
        xq[: x_format.row], x_format.spec, "row", x.shape,
        wq[: w_format.row], w_format.spec, "row", weight.shape,
        bias, x.dtype,
    )  # fmt: skip
    return y, xq, wq


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offset, formats, seed, group, state):
        y, xq, wq = _forward(x, weight, bias, formats.input, formats.weight, group, state)
        # What the backward pass reads: the column direction, or the numbers themselves where both directions share them.
        xq = xq[formats.input.row :] if formats.input.column else xq
        wq = wq[formats.weight.row :] if formats.weight.column else wq
        ctx.save_for_backward(offset, *xq, *wq)
        ctx.x_arrays = len(xq)
        ctx.shapes = (x.shape, weight.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.settings = (formats, seed, group, state)
        return y

    @staticmethod
    def backward(ctx, dy):
        formats, seed, group, state = ctx.settings
        x_shape, w_shape = ctx.shapes
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        offset, *arrays = ctx.saved_tensors
        xq, wq = arrays[: ctx.x_arrays], arrays[ctx.x_arrays :]
        format = formats.grad_output
        dyq = _quantized(dy.contiguous(), format, seed, offset, group, state.grad_output)
        row, column = dyq[: format.row], dyq[format.row :] if format.column else dyq
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = matmul(
                row, format.spec, "row", dy.shape, wq, formats.weight.spec, "column", w_shape, None, x_dtype
            )
        if ctx.needs_input_grad[1]:
            dw = matmul(
                column, format.spec, "column", dy.shape, xq, formats.input.spec, "column", x_shape, None, w_dtype
            )
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None, None, None

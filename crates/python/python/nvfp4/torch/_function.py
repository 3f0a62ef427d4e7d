"""``y = x·wᵀ + bias`` with each operand in its format, and its gradient.

| product | reads | and |
|---|---|---|
| forward, ``y = x·wᵀ`` | x, row | w, row |
| ``dx = dy·w`` | dy, row | w, column |
| ``dw = dyᵀ·x`` | dy, column | x, column |

A pass is one operation, ``torch.ops.nvfp4.linear`` or ``torch.ops.nvfp4.linear_backward``. What the
backward pass reads of x and w is kept as one block of bytes each.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from . import _ops  # noqa: F401  (makes the operations known)
from ._composed import Composed, forward
from ._delayed import Kept, State
from ._finite import Watch
from ._formats import Formats
from ._once import once
from ._plain import Plain, product

_linear = torch.ops.nvfp4.linear.default
_linear_backward = torch.ops.nvfp4.linear_backward.default

STATELESS, UNWATCHED = State(), Watch()
# Formats, seed, state and watch of a layer.
_Settings = Tuple[Formats, int, State, Watch]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    formats: Formats,
    seed: int = 0,
    group=None,
    state: State = STATELESS,
    watch: Watch = UNWATCHED,
) -> Tensor:
    """The product of a linear layer.

    ``group`` is the process group whose workers agree on amaxes, if any.
    """
    shape, (outputs, inputs) = x.shape, weight.shape
    if shape[-1] != inputs:
        check_features(x, inputs)
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    whole = group is None and formats.trained
    # A whole pass takes any shape, everything else a matrix.
    reshaped = len(shape) != 2 and not whole
    if reshaped:
        x = x.reshape(-1, inputs)
    trains = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    offset = None
    if trains and formats.grad_output.rounding == "stochastic":
        # Drawn from torch's own generator, so that a recomputed forward pass draws the same, and a
        # replayed graph afresh.
        offset = torch.randint(2**62, (1,), device=x.device)
    if whole:
        settings = (formats, seed, state, watch)
        y = _Linear.apply(x, weight, bias, offset, settings) if trains else _evaluated(x, weight, bias, settings)
    elif not formats.quantizes:
        y = Plain.apply(x, weight, bias) if trains else product(x, weight, bias)
    elif trains:
        y = Composed.apply(x, weight, bias, offset, formats, seed, group, state, watch)
    else:
        unseen = State(*(kept and kept.unseen() for kept in state))
        y = forward(x, weight, bias, formats, (formats.input_row, formats.weight_row), group, unseen, watch)[0]
    return shaped(y, (*shape[:-1], outputs)) if reshaped else y


def shaped(y: Tensor, shape: Tuple[int, ...]) -> Tensor:
    """A result in another shape that is no view of anything, as that of ``torch.nn.Linear``: hooks
    on it survive operations in place.
    """
    return torch.ops.aten._unsafe_view(y, shape)


def check_features(x: Tensor, expected: int) -> None:
    """Refuses an input that a layer does not take."""
    if x.shape[-1] != expected:
        raise ValueError(f"the input has {x.shape[-1]} features, this layer takes {expected}")


def _scales(*kept: Optional[Kept]) -> List[Optional[Tensor]]:
    """The scales of tensors as operations take them; none if no tensor has any."""
    if not any(kept):
        return []
    return [scale for of in kept for scale in ((None, None) if of is None else (of.scale, of.column_scale))]


def _name(formats: Formats, watch: Watch) -> str:
    """The name of tensors that must be finite."""
    return watch.name if formats.finite == "refuse" else ""


def _evaluated(x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: _Settings) -> Tensor:
    formats, _, state, watch = settings
    scales = [] if state is STATELESS else _scales(state.input, state.weight)
    made = _linear(x, weight, bias, formats.evaluated, scales, _name(formats, watch), formats.alignment)
    if formats.finite == "refuse":
        watch.note(made[-1])
    return made[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offset, settings):
        formats, _, state, watch = settings
        scales = [] if state is STATELESS else _scales(state.input, state.weight)
        made = _linear(x, weight, bias, formats.trained, scales, _name(formats, watch), formats.alignment)
        ctx.save_for_backward(made[1], made[2], offset)
        ctx.call = (settings, weight.shape[1], x.dtype, weight.dtype, None if bias is None else bias.dtype)
        if formats.finite == "refuse":
            watch.note(made[-1])
        if state is not STATELESS:
            _note(made[3:], state.input, state.weight)
        return made[0]

    @staticmethod
    @once
    def backward(ctx, dy):
        (formats, seed, state, watch), features, x_dtype, weight_dtype, bias_dtype = ctx.call
        x, weight, offset = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        if needs_x or needs_weight:
            scales = [] if state is STATELESS else _scales(state.grad_output)
            made = _linear_backward(
                dy, x, weight, formats.trained, features, x_dtype if needs_x else None,
                weight_dtype if needs_weight else None, seed, offset, scales, _name(formats, watch),
                formats.alignment,
            )  # fmt: skip
            gradients = needs_x + needs_weight
            dx = made[0] if needs_x else None
            dw = made[gradients - 1] if needs_weight else None
            if formats.finite == "refuse":
                watch.note(made[-1], 2)
            if state is not STATELESS:
                _note(made[gradients:], state.grad_output)
        if needs_bias:
            rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
            db = rows.sum(0, dtype=torch.float32)
            db = db if bias_dtype is torch.float32 else db.to(bias_dtype)
        return dx, dw, db, None, None


def _note(amaxes: List[Tensor], *kept: Optional[Kept]) -> None:
    """Joins amaxes that an operation saw to those of this step, in the order of ``_scales``."""
    at = 0
    for of in kept:
        if of is not None:
            at = of.note(amaxes, at)

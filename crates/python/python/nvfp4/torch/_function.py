"""``y = x·wᵀ + bias`` with each operand in its format, and its gradient.

| product | reads | and |
|---|---|---|
| forward, ``y = x·wᵀ`` | x, row | w, row |
| ``dx = dy·w`` | dy, row | w, column |
| ``dw = dyᵀ·x`` | dy, column | x, column |

A pass is one operation, ``torch.ops.nvfp4.linear`` or ``torch.ops.nvfp4.linear_backward``. What the
backward pass reads of x and w is kept as one block of bytes each. A weight whose codes are there
(``_kept.py``, ``_quantized.py``) goes through ``torch.ops.nvfp4.linear_codes``.
"""

from __future__ import annotations

import functools
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from ._coded import Noted, autocast, few, from_codes
from ._composed import Composed, forward
from ._delayed import HandedOver, State
from ._delayed import Kept as KeptScales
from ._finite import Watch
from ._formats import Formats
from ._kept import Kept
from ._main_grad import Later, added, dtype_of
from ._once import once
from ._ops import linear as _linear
from ._ops import linear_backward as _linear_backward
from ._ops import linear_codes as _linear_codes
from ._parallel import Parallel, Settings, parallel_linear
from ._plain import Plain, product
from ._quantized import Codes, coded as coded_of, prepare_block

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
    kept: Optional[Kept] = None,
    amax: Optional[Tensor] = None,
    main: Optional[Tensor] = None,
    handed: Optional[HandedOver] = None,
    later: Optional[Later] = None,
    parallel: Optional[Parallel] = None,
) -> Tensor:
    """The product of a linear layer.

    ``group`` is the process group whose workers agree on amaxes, if any. ``kept`` has the codes of
    the weight until it changes. ``amax`` is that of x where it is known before, for a weight that is
    there as codes. ``main`` is the weight if its gradient goes into ``main_grad``. ``handed`` says
    which tensors other modules have quantized, ``later`` where the weight's gradient waits,
    ``parallel`` how workers split the product.
    """
    shape, (outputs, inputs) = x.shape, weight.shape
    x = autocast(x)
    coded = coded_of(weight)
    if coded is not None:
        formats = formats.for_codes(coded.spec)
        if not formats.coded:
            raise ValueError(f"{formats}: random numbers in the forward pass need a weight in high precision")
    # Gradients in high precision, from the decoded weight.
    decoded = coded is not None and (
        not formats.trained or "column" not in coded.multiplied or amax is not None
    )
    if decoded and parallel is not None:
        raise ValueError(
            "tensor parallelism: a weight that is codes of one direction, or codes in a recipe that leaves a direction in "
            "high precision, cannot be split; use a weight in high precision"
        )
    if decoded and group is not None:
        raise ValueError(
            "reduce_amaxes: a layer whose weight is codes of one direction, or whose recipe leaves a direction in high "
            "precision, does not agree on amaxes; stop_reducing_amaxes ends it"
        )
    given: Optional[Tensor] = None
    if handed is not None and formats.quantizes and coded is None:
        state = state.given(formats, handed)
        fits = handed.input is not None and handed.input.spec == formats.input.spec
        given = handed.input.amax if fits and handed.input is not None else None
    apart = group is not None or given is not None or later is not None or parallel is not None
    whole = not apart and (formats.trained or decoded)
    trains = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    # A whole pass takes any shape, everything else a matrix.
    reshaped = len(shape) != 2 and not whole
    if reshaped:
        x = x.reshape(-1, inputs)
    offset = None
    if trains and not decoded and formats.grad_output.rounding == "stochastic":
        # Drawn from torch's own generator, so that a recomputed forward pass draws the same, and a
        # replayed graph afresh.
        offset = torch.randint(2**62, (1,), device=x.device)
    if coded is not None and decoded:
        noted = Noted(state.input, watch if formats.finite == "refuse" else None)
        y = from_codes(x, coded, bias, formats.coded, amax, noted, main)
    elif whole:
        settings = (formats, seed, state, watch)
        codes = None if coded is None else coded.codes
        if kept is not None:
            codes = kept.find(weight, formats.evaluated, columns=trains)
        if trains:
            y = _Linear.apply(x, weight, bias, offset, settings, codes, kept, main)
        else:
            y = _evaluated(x, weight, bias, settings, codes, kept)
    elif parallel is not None:
        unseen = state if trains else State(*(kept and kept.unseen() for kept in state))
        data = () if group is None else (group,)
        settings_of_all = Settings(formats, seed, unseen, watch, parallel, data, kept)
        y = parallel_linear(x, weight, bias, settings_of_all, trains, offset, main, later)
        if len(shape) > 2:
            tokens = y.shape[0] * shape[0] // max(shape[:-1].numel(), 1)
            shape = torch.Size((tokens, *shape[1:]))
    elif not formats.quantizes:
        y = Plain.apply(x, weight, bias, main, later) if trains else product(x, weight, bias)
    elif trains:
        y = Composed.apply(x, weight, bias, offset, formats, seed, group, state, watch, main, given, later)
    else:
        unseen = State(*(kept and kept.unseen() for kept in state))
        pair = formats.input_row, formats.weight_row
        y = forward(x, weight, bias, formats._replace(alignment=1), pair, group, unseen, watch, given)[0]
    return shaped(y, (*shape[:-1], outputs)) if reshaped else y


def shaped(y: Tensor, shape: Tuple[int, ...]) -> Tensor:
    """A result in another shape that is no view of anything, as that of ``torch.nn.Linear``: hooks
    on it survive operations in place.
    """
    return torch.ops.aten._unsafe_view(y, shape)


def _scales(*kept: Optional[KeptScales]) -> List[Optional[Tensor]]:
    """The scales of tensors as operations take them; none if no tensor has any."""
    if not any(kept):
        return []
    return [scale for of in kept for scale in ((None, None) if of is None else (of.scale, of.column_scale))]


def _name(formats: Formats, watch: Watch) -> str:
    """The name of tensors that must be finite."""
    return watch.name if formats.finite == "refuse" else ""


def _evaluated(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: _Settings, codes: Optional[Codes], kept: Optional[Kept]
) -> Tensor:
    formats, _, state, watch = settings
    name = _name(formats, watch)
    if codes is None:
        scales = [] if state is STATELESS else _scales(state.input, state.weight)
        text = formats.evaluated if kept is None else f"{formats.evaluated} keep"
        made = _linear(x, weight, bias, text, scales, name)
        if kept is not None:
            kept.keep(weight, formats.evaluated, Codes(made[1]))
    else:
        scales = [] if state is STATELESS else _scales(state.input, None)
        if codes.prepared is None and few(x):
            codes = _prepared(weight, formats, codes, kept)
        made = _linear_codes(x, codes.row, codes.prepared, bias, formats.evaluated, weight.shape[0], None, scales, name)
    if formats.finite == "refuse":
        watch.note(made[-1])
    return made[0]


def _prepared(weight: Tensor, formats: Formats, codes: Codes, kept: Optional[Kept]) -> Codes:
    """The codes of a weight that serves again, in the order of tensor cores or of this CPU too."""
    coded = coded_of(weight)
    if coded is not None:
        coded.prepare()
        return coded.codes
    made = prepare_block(codes.row, formats.weight.spec, *weight.shape)
    codes = codes._replace(prepared=made[0]) if made else codes
    if kept is not None:
        kept.keep(weight, formats.evaluated, codes)
    return codes


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offset, settings, codes, kept, main):
        formats, _, state, watch = settings
        trains_weight = ctx.needs_input_grad[1]
        # Blocks along the tokens are those of the weight's gradient.
        text, at, alignment = (formats.trained, 2, formats.alignment) if trains_weight else (formats.frozen, 1, 1)
        name = _name(formats, watch)
        if codes is None:
            scales = [] if state is STATELESS else _scales(state.input, state.weight)
            made = _linear(x, weight, bias, text if kept is None else f"{text} keep", scales, name, alignment)
            if kept is not None:
                kept.keep(weight, formats.evaluated, Codes(made[at], made[at + 1]))
                at += 1
            column, noted = made[at], (state.input, state.weight)
            at += 1
        else:
            scales = [] if state is STATELESS else _scales(state.input, None)
            made = _linear_codes(x, codes.row, None, bias, text, weight.shape[0], None, scales, name, alignment)
            column, noted = codes.column, (state.input,)
        # Without a gradient of the weight, nothing of x is read again.
        ctx.save_for_backward(made[1] if trains_weight else column, column, offset)
        ctx.call = (settings, text, alignment, weight.shape[1], x.dtype, weight.dtype, None if bias is None else bias.dtype, main)
        if formats.finite == "refuse":
            watch.note(made[-1])
        if state is not STATELESS:
            _note(made[at:], *noted)
        return made[0]

    @staticmethod
    @once
    def backward(ctx, dy):
        (formats, seed, state, watch), text, alignment, features, x_dtype, weight_dtype, bias_dtype, main = ctx.call
        x, weight, offset = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dw = db = side = None
        if needs_bias:
            side = _beside(dy)
            if side is None:
                db = _bias_gradient(dy, bias_dtype)
            else:
                with torch.cuda.stream(side):
                    db = _bias_gradient(dy, bias_dtype)
        if needs_x or needs_weight:
            scales = [] if state is STATELESS else _scales(state.grad_output)
            made = _linear_backward(
                dy, x, weight, text, features, x_dtype if needs_x else None,
                dtype_of(main, weight_dtype) if needs_weight else None, seed, offset, scales, _name(formats, watch), alignment,
            )  # fmt: skip
            gradients = needs_x + needs_weight
            dx = made[0] if needs_x else None
            dw = added(main, made[gradients - 1]) if needs_weight else None
            if formats.finite == "refuse":
                watch.note(made[-1], 2)
            if state is not STATELESS:
                _note(made[gradients:], state.grad_output)
        if side is not None:
            torch.cuda.current_stream(dy.device).wait_stream(side)
        return dx, dw, db, None, None, None, None, None


def _bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    # Summed in float32, whatever the type.
    return rows.sum(0) if rows.dtype is dtype else rows.sum(0, dtype=torch.float32).to(dtype)


def _beside(dy: Tensor) -> Optional[torch.cuda.Stream]:
    """A stream for work beside the products while a graph is captured; it begins after the work so
    far. The GPU has room for both, but for Python a second stream is more than it saves.
    """
    if torch.compiler.is_compiling() or not dy.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    side = _side_stream(dy.device)
    side.wait_stream(torch.cuda.current_stream(dy.device))
    return side


@functools.lru_cache(maxsize=None)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _note(amaxes: List[Tensor], *kept: Optional[KeptScales]) -> None:
    """Joins amaxes that an operation saw to those of this step, in the order of ``_scales``."""
    at = 0
    for of in kept:
        if of is not None:
            at = of.note(amaxes, at)

"""The experts of a layer on a GPU: each tensor is quantized in one launch, and each product is one
call, however many experts there are.

An expert has the codes that it has by itself. Its products add up in another order where another
kernel computes them, and random numbers are drawn once for all experts.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from nvfp4 import _nvfp4

from ._formats import Formats
from ._kept import Kept, can_be_kept
from ._main_grad import added, dtype_of
from ._once import once
from ._ops import unwatched
from ._quantized import Codes

# Kernels for groups take whole tiles of features.
TILE = 128
# In the text of a spec whose columns are quantized from decoded rows.
DECODED = " from row"


class Call(NamedTuple):
    """What a layer says about a pass of its experts."""

    formats: Formats
    # Of tokens, for each expert.
    splits: List[int]
    seed: int
    # The codes of each weight until it changes.
    kept: List[Kept]
    # Weights whose gradients go into ``main_grad``.
    mains: List[Optional[Tensor]]


def can_be_together(x: Tensor, weights: Sequence[Tensor], formats: List[Formats]) -> bool:
    """Whether one launch serves all experts of tokens on a GPU: in eager mode, with weights in high
    precision and experts of one format.
    """
    if x.shape[0] == 0:
        return False
    first = formats[0]
    if not first.trained or first.finite == "refuse" or any(of != first for of in formats):
        return False
    outputs, inputs = weights[0].shape
    same = all(unwatched(x, weight) and weight.dtype == weights[0].dtype for weight in weights)
    return same and outputs % TILE == 0 and inputs % TILE == 0 and not any(DECODED in of.spec for of in first.tensors)


def linear_together(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]], call: Call) -> Tensor:
    """``x·wᵀ + bias`` of each expert's tokens."""
    parameters = [*weights, *biases]
    trains = torch.is_grad_enabled() and any(of is not None and of.requires_grad for of in (x, *parameters))
    if not trains:
        return _forward(x, weights, biases, call, call.formats.evaluated, False)[0]
    offset = None
    if call.formats.grad_output.rounding == "stochastic":
        offset = torch.randint(2**62, (1,), device=x.device)
    return _Together.apply(x, offset, call, *parameters)


def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]], call: Call, text: str, trains: bool
) -> List[Any]:
    """y; the block of x's columns if it is made; the block of the weights' columns if it trains."""
    x, codes = _aligned(x), _found(weights, call, trains)
    bias = None if biases[0] is None else torch.cat([of.detach() for of in biases])  # type: ignore[union-attr]
    outputs = weights[0].shape[0]
    if codes is not None:
        made = _nvfp4._linear_groups(x, codes.row, True, bias, text, call.splits, outputs)
        return [*made, codes.column] if trains else made
    keeps = all(can_be_kept(weight) for weight in weights)
    whole = torch.cat([weight.detach() for weight in weights])
    made = _nvfp4._linear_groups(x, whole, False, bias, f"{text} keep" if keeps else text, call.splits, outputs)
    if keeps:
        row = made.pop(-2 if trains else -1)
        codes = Codes(row, made[-1] if trains else None)
        for kept, weight in zip(call.kept, weights):
            kept.keep(weight, _key(call), codes)
    return made


def _aligned(x: Tensor) -> Tensor:
    """Tokens as kernels for groups read them: rows side by side, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _key(call: Call) -> str:
    """Codes of all experts are no codes of one."""
    return f"{call.formats.evaluated}, {len(call.kept)} experts"


def _found(weights: Sequence[Tensor], call: Call, columns: bool) -> Optional[Codes]:
    """The codes of all weights, if none has changed."""
    if not all(can_be_kept(weight) for weight in weights):
        return None
    found = [kept.find(weight, _key(call), columns) for kept, weight in zip(call.kept, weights)]
    return found[0] if all(of is not None and of is found[0] for of in found) else None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offset, call, *parameters):
        count = len(call.splits)
        weights, biases = parameters[:count], parameters[count:]
        trains_weights = any(ctx.needs_input_grad[3 : 3 + count])
        text = call.formats.trained if trains_weights else call.formats.frozen
        made = _forward(x, weights, biases, call, text, True)
        # Without gradients of the weights, nothing of x is read again.
        ctx.save_for_backward(made[1] if trains_weights else None, made[-1], offset)
        ctx.call = call, text
        ctx.dtypes = x.dtype, weights[0].dtype, None if biases[0] is None else biases[0].dtype
        ctx.features = weights[0].shape[1]
        return made[0]

    @staticmethod
    @once
    def backward(ctx, dy):
        (call, text), (x_dtype, w_dtype, bias_dtype) = ctx.call, ctx.dtypes
        x, weights, offset = ctx.saved_tensors
        count = len(call.splits)
        needs_x, _, _, *needs = ctx.needs_input_grad
        dx, dws, dbs = None, [None] * count, [None] * count
        needs_w = any(needs[:count])
        # One type for all: that of what gradients are added to, if they are.
        w_dtype = dtype_of(next((main for main in call.mains if main is not None), None), w_dtype)
        if needs_x or needs_w:
            made = _nvfp4._linear_groups_backward(
                _aligned(dy), weights if x is None else x, weights, text, call.splits, ctx.features,
                x_dtype if needs_x else None, w_dtype if needs_w else None, call.seed, offset,
            )  # fmt: skip
            dx = made[0] if needs_x else None
            if needs_w:
                gradients = zip(call.mains, made[-1].unbind(), needs)
                dws = [added(main, dw) if needed else None for main, dw, needed in gradients]
        if any(needs[count:]):
            sums = [part.sum(0, dtype=torch.float32).to(bias_dtype) for part in dy.split(call.splits)]
            dbs = [db if needed else None for db, needed in zip(sums, needs[count:])]
        return dx, None, None, *dws, *dbs

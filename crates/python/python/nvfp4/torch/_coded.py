"""``y = x·wᵀ + bias`` where the weight exists as codes, with gradients in high precision.

Products read the codes. dx is that of the decoded weight, dw that of x as it is: for layers whose
weights alone are quantized, for weights of which only the row direction is there, and for recipes
whose backward pass is in high precision. Codes of both directions in a recipe that quantizes
everything train as any weight does (``_function.py``).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ._delayed import Kept
from ._finite import Watch
from ._main_grad import added, dtype_of
from ._once import once
from ._ops import linear_codes as _linear_codes
from ._quantized import FUNCTIONS, QuantizedTensor, dequantize_block

# Up to so many tokens, products read prepared weights faster.
FEW = {"cuda": 256, "cpu": 4}


class Noted(NamedTuple):
    """What a pass notes about x: its amax for delayed scaling, and whether it is finite; None for
    what it does not.
    """

    scale: Optional[Kept] = None
    watch: Optional[Watch] = None


def linear_codes(input: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """``torch.nn.functional.linear`` with a quantized weight: x stays as it is."""
    if not isinstance(weight, QuantizedTensor):  # one that takes the place of x or the bias
        plain = [t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (input, bias)]
        return torch.nn.functional.linear(plain[0], weight, plain[1])  # type: ignore[arg-type]
    return from_codes(autocast(input), weight, bias, _weight_only(weight.spec))


FUNCTIONS[torch.nn.functional.linear] = linear_codes


@functools.lru_cache(maxsize=None)
def _weight_only(spec: str) -> str:
    return f"high-precision | {spec} | high-precision | precise precise precise | evaluated"


def autocast(x: Tensor) -> Tensor:
    """The input in the type that ``torch.autocast`` asks for."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def from_codes(
    x: Tensor,
    weight: Any,
    bias: Optional[Tensor],
    formats: str,
    amax: Optional[Tensor] = None,
    noted: Noted = Noted(),
    main: Optional[Tensor] = None,
) -> Tensor:
    """The product, with its gradient if one is asked for."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return FromCodes.apply(x, weight, bias, formats, amax, noted, main)
    if noted.scale is not None:
        noted = noted._replace(scale=noted.scale.unseen())
    return product(x, weight, bias, formats, amax, noted)


def few(x: Tensor) -> bool:
    """Whether a weight is to be prepared for the product of these tokens. A compiled or captured
    product takes what is there.
    """
    return (
        not torch.compiler.is_compiling()
        and x.numel() <= FEW.get(x.device.type, 0) * x.shape[-1]
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def product(
    x: Tensor,
    weight: Any,
    bias: Optional[Tensor],
    formats: str,
    amax: Optional[Tensor],
    noted: Noted,
    trains: bool = False,
) -> Tensor:
    """The forward pass alone. On a CPU, the codes of a weight that trains are not worth preparing."""
    if few(x) and (x.is_cuda or not trains):
        weight.prepare()
    codes, of = weight.codes, noted.scale
    bias = None if bias is None else bias.detach()
    scales = [] if of is None else [of.scale, of.column_scale, None, None]
    name = "" if noted.watch is None else noted.watch.name
    made = _linear_codes(x, codes.row, codes.prepared, bias, formats, weight.shape[0], amax, scales, name)
    if noted.watch is not None:
        noted.watch.note(made[-1])
    if of is not None:
        of.note(made, 1)
    return made[0]


class FromCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, formats, amax, noted, main):
        needs_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_weight else None, weight.codes.row)
        ctx.call = (weight.spec, weight.matrix, x.dtype, weight.dtype, None if bias is None else bias.dtype, main)
        return product(x, weight, bias, formats, amax, noted, trains=needs_weight)

    @staticmethod
    @once
    def backward(ctx, dy):
        x, row = ctx.saved_tensors
        spec, matrix, x_dtype, weight_dtype, bias_dtype, main = ctx.call
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if needs_x:
            dx = torch.matmul(dy.to(x_dtype), dequantize_block(row, spec, *matrix, x_dtype))
        if needs_weight:
            dw = torch.mm(flat.t().to(x_dtype), x.reshape(-1, x.shape[-1]))
            dw = added(main, dw.to(dtype_of(main, weight_dtype)))
        if needs_bias:
            db = flat.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None, None

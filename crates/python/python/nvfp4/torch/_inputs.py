"""What layers take, and what they say about anything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DENSE = torch.strided


def fits(x: Any, weight: Tensor) -> bool:
    """Whether a layer takes an input as it is. Every call asks, so it is short."""
    return (
        isinstance(x, Tensor)
        and x.layout is _DENSE
        and x.dtype in FLOATS
        and weight.dtype in FLOATS
        and x.device == weight.device
        and x.ndim > 0
        and x.shape[-1] == weight.shape[-1]
    )


def check_input(x: Any, weight: Tensor, name: str, quantizes: bool) -> None:
    """Refuses what a layer cannot take, by the layer's name for it: ``name`` has ``{}`` for the
    slot.
    """
    input, features = name.format("input"), weight.shape[-1]
    if not isinstance(x, Tensor):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{input}: expected a torch.Tensor, got {kind}; make one with torch.as_tensor"
        )
    if x.is_nested:
        raise TypeError(
            f"{input}: expected a dense tensor, got a nested one; "
            "give its tokens alone, as with input.values()"
        )
    if quantizes and x.layout is not _DENSE:
        raise TypeError(
            f"{input}: expected a dense tensor, got one of {x.layout}; "
            "make it dense with input.to_dense()"
        )
    if x.dim() == 0:
        raise ValueError(
            f"{input}: expected {features} features in the last dimension, "
            "got a number without dimensions"
        )
    if x.shape[-1] != features:
        turned = "; it may be transposed" if x.dim() > 1 and x.shape[-2] == features else ""
        raise ValueError(
            f"{input}: expected {features} features in the last dimension, "
            f"got {x.shape[-1]} (shape {list(x.shape)}){turned}"
        )
    if x.device != weight.device:
        _refuse_device(x, weight, name)
    if quantizes and weight.dtype not in FLOATS:
        raise TypeError(
            _expected(name.format("weight"), weight)
            + "; cast the layer, as with layer.to(torch.float32)"
        )
    device = x.device.type
    if x.dtype in FLOATS or (device != "meta" and torch.is_autocast_enabled(device)):
        return
    if quantizes or not (x.is_floating_point() or x.is_complex()):
        to = weight.dtype if weight.dtype in FLOATS else torch.float32
        raise TypeError(_expected(input, x) + f"; cast it, as with input.to({to})")


def _expected(name: str, x: Tensor) -> str:
    return f"{name}: expected float32, bfloat16 or float16, got {x.dtype}"


def _refuse_device(x: Tensor, weight: Tensor, name: str) -> None:
    if weight.is_meta:
        raise ValueError(
            f"{name.format('weight')}: it is on the meta device and has no numbers; load them with "
            'load_state_dict(state, assign=True), or make room with to_empty(device="..."), '
            "then load or initialize"
        )
    if x.is_meta:
        raise ValueError(
            f"{name.format('input')}: it is on the meta device and has no numbers; "
            f"the weight is on {weight.device}"
        )
    raise ValueError(
        f"{name.format('input')}: it is on {x.device} and the weight on {weight.device}; "
        f'move the input with input.to("{weight.device}"), or the layer with layer.to("{x.device}")'
    )

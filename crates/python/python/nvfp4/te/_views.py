"""Quantized tensors in other shapes, and copies of them, with gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any, Iterable

import torch
from torch import Tensor


def resolved(old: Iterable[int], shape: Any) -> torch.Size:
    """A shape as ``view`` takes it, with its -1 filled in."""
    while isinstance(shape, (tuple, list)) and len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if -1 in shape:
        rest = -math.prod(shape)
        shape = tuple(math.prod(old) // rest if size == -1 else size for size in shape)
    if math.prod(shape) != math.prod(old):
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {math.prod(old)}")
    return torch.Size(shape)


def contiguous_strides(shape: Iterable[int]) -> tuple:
    """The strides of a tensor whose values lie side by side."""
    strides = [1]
    for size in reversed(tuple(shape)[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if tuple(shape) else ()


def cloned(tensor: Any) -> Any:
    """A tensor of copies of the arrays."""
    kwargs = {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in tensor.get_metadata().items()
    }
    return type(tensor)(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **kwargs)


class Same(torch.autograd.Function):
    """The tensor itself, or one of copies of its arrays."""

    @staticmethod
    def forward(ctx, tensor, copied=False):
        ctx.dtype = tensor.dtype
        return cloned(tensor) if copied else tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad.detach().to(ctx.dtype), None


class View(torch.autograd.Function):
    """The same in another shape; the values where scales forbid it."""

    @staticmethod
    def forward(ctx, tensor, shape):
        ctx.shape = tensor.shape
        new = resolved(tensor.shape, shape)
        made = tensor._shaped(new)
        if made is None:
            warnings.warn(
                f"{type(tensor).__name__} does not support reshaping inner dimension (attempted to "
                f"reshape dims={tuple(tensor.shape)} to {tuple(new)}); the values are reshaped",
                stacklevel=2,
            )
            return tensor.dequantize().view(new)
        return made

    @staticmethod
    def backward(ctx, grad):
        return grad.reshape(ctx.shape), None

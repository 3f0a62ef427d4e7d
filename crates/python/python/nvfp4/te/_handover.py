"""Tensors that one module hands over to another as it has quantized them.

A tensor has the numbers of its codes, and says how they were made: so the module that reads it gets
the same codes, and nothing is rounded twice.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import ContextManager, Iterator, Optional

from torch import Tensor

from nvfp4.torch._delayed import Given, HandedOver

_NAME = "_nvfp4_given"
_gradients: contextvars.ContextVar[Optional[Given]] = contextvars.ContextVar(
    "nvfp4_te_gradients", default=None
)


def hand_over(x: Tensor, given: Optional[Given]) -> Tensor:
    """The same tensor, which says how it was quantized."""
    if given is not None:
        setattr(x, _NAME, given)
    return x


def gradients_as(given: Optional[Given]) -> ContextManager[None]:
    """Inside, linear layers are told how the gradients of their outputs will be quantized."""
    return contextlib.nullcontext() if given is None else _gradients_as(given)


@contextlib.contextmanager
def _gradients_as(given: Given) -> Iterator[None]:
    token = _gradients.set(given)
    try:
        yield
    finally:
        _gradients.reset(token)


def handed_over(x: Tensor) -> Optional[HandedOver]:
    """What a linear layer with this input is handed over, if anything."""
    input, gradients = getattr(x, _NAME, None), _gradients.get()
    return None if input is None and gradients is None else HandedOver(input, gradients)

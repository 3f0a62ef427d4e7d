"""The activations between the two products of an MLP, under TransformerEngine's names.

Those that end in "glu" take twice the features: the first half, activated, times the second.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Optional

from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]


# Functions with names, so that they can be pickled.
def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def srelu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def glu(x: Tensor) -> Tensor:
    return x.chunk(2, -1)[0].sigmoid() * x.chunk(2, -1)[1]


def geglu(x: Tensor) -> Tensor:
    return gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def qgeglu(x: Tensor) -> Tensor:
    return qgelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def reglu(x: Tensor) -> Tensor:
    return functional.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def sreglu(x: Tensor) -> Tensor:
    return srelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def swiglu(x: Tensor) -> Tensor:
    return functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def clamped_swiglu(
    x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Tensor:
    gate = x.chunk(2, -1)[0].clamp(max=limit)
    linear = x.chunk(2, -1)[1].clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (linear + glu_linear_offset)


_ACTIVATIONS: Dict[str, Activation] = {
    "gelu": gelu,
    "geglu": geglu,
    "glu": glu,
    "qgelu": qgelu,
    "qgeglu": qgeglu,
    "relu": functional.relu,
    "reglu": reglu,
    "srelu": srelu,
    "sreglu": sreglu,
    "silu": functional.silu,
    "swiglu": swiglu,
    "clamped_swiglu": clamped_swiglu,
}


def named(activation: str, settings: Optional[Dict[str, Any]] = None) -> Activation:
    """The activation of this name. Only that of "clamped_swiglu" has settings."""
    if activation not in _ACTIVATIONS:
        known = ", ".join(f"'{name}'" for name in _ACTIVATIONS)
        raise ValueError(f"unknown activation '{activation}'; there are {known}")
    if settings and activation == "clamped_swiglu":
        return functools.partial(clamped_swiglu, **settings)
    return _ACTIVATIONS[activation]


def inputs_of(activation: Any) -> int:
    """How many features of its input make one of its output."""
    return 2 if isinstance(activation, str) and activation.endswith("glu") else 1

"""A linear layer."""

from __future__ import annotations

import functools
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor

import nvfp4

from ._formats import Formats, formats_of
from ._layer import Layer
from ._parameters import as_asked


class OneProduct(Layer):
    """A layer with the product of one weight."""

    formats: Formats

    def products(self) -> List[Tuple[str, str, Formats]]:
        return [("", self.path + ":{}", self.formats)]

    def follow_plan(self, plan: nvfp4.Plan) -> None:
        self.formats = formats_of(plan, self.path)


class Linear(OneProduct, torch.nn.Linear):
    """``torch.nn.Linear`` with its products in the formats of a recipe.

    ``recipe`` is a preset's name or an :class:`nvfp4.Recipe`; ``path`` is the module's name in the
    model, by which recipes know it. Weight and bias stay in high precision, under the same names.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        recipe: Union[str, nvfp4.Recipe] = "nvfp4",
        path: str = "linear",
        seed: int = 0,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.path, self.seed = path, seed
        self.use_recipe(recipe)
        as_asked(self)

    def weights(self) -> List[str]:
        return ["weight"]

    def forward(self, input: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        return self.product(input, self.weight if weight is None else weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"


class Transposed(OneProduct):
    """A layer whose weight lies transposed, [in, out], as ``Conv1D`` of transformers has it."""

    weight: Tensor
    bias: Optional[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        return str(self.formats)


@functools.lru_cache(maxsize=None)
def quantized_class(kind: Any, of: Any) -> Any:
    """The class of a layer that was ``of``: its product is that of ``kind``, all else stays."""
    if of is torch.nn.Linear:
        return kind

    def reduce(self, protocol):
        return _restored, (kind, of), self.__getstate__()

    # There is no module to find such a class in, so pickles make it again.
    return type(f"Quantized{of.__name__}", (kind, of), {"__reduce_ex__": reduce, "__module__": __name__})


def _restored(kind: Any, of: Any) -> torch.nn.Module:
    made = quantized_class(kind, of)
    return made.__new__(made)


def become(module: torch.nn.Module, kind: Any, path: str, seed: int) -> None:
    """Makes a layer a quantized one in place: parameters, hooks, attributes and references stay."""
    of: Any = type(module)
    module.__class__ = quantized_class(kind, of)
    assert isinstance(module, Layer)
    module.path, module.seed = path, seed

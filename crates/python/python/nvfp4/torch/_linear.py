"""A linear layer."""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor

import nvfp4

from ._delayed import Delays
from ._formats import Formats, linear_formats
from ._function import linear


class Linear(Delays, torch.nn.Linear):
    """``torch.nn.Linear`` with its products in the formats of a recipe.

    ``recipe`` is a preset's name or an :class:`nvfp4.Recipe`; ``path`` is the module's name in the model, by which recipes know it. Weight and
    bias stay in high precision, under the same names.
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
        self.path, self.seed, self.amax_group = path, seed, None
        self.use_recipe(recipe)

    @classmethod
    def of(cls, module: torch.nn.Linear, formats: Formats, path: str, seed: int = 0) -> "Linear":
        """A layer with another one's parameters, which both then share."""
        new = cls.__new__(cls)
        torch.nn.Module.__init__(new)
        new.in_features, new.out_features = module.in_features, module.out_features
        new.weight, new.bias = module.weight, module.bias
        new.training = module.training
        new.formats, new.path, new.seed, new.amax_group = formats, path, seed, None
        new.keep_scales({"": formats}, module.weight.device)
        return new

    def use_recipe(self, recipe: Union[str, nvfp4.Recipe]) -> None:
        """Goes over to another recipe. Nothing else changes: parameters are in high precision."""
        self.formats = linear_formats(recipe, self.path)
        self.keep_scales({"": self.formats}, self.weight.device)

    def forward(self, input: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        weight = self.weight if weight is None else weight
        state = self.state_of(self.formats)
        return linear(input, weight, self.bias, self.formats, self.seed, self.amax_group, state)

    def extra_repr(self) -> str:
        f = self.formats
        return f"{super().extra_repr()}, input={f.input.spec}, weight={f.weight.spec}, grad_output={f.grad_output.spec}"

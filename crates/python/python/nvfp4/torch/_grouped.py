"""Several linear layers, one per expert."""

from __future__ import annotations

from typing import List, Tuple, Union

import torch
from torch import Tensor

import nvfp4

from ._formats import Formats, formats_of
from ._function import shaped
from ._inputs import check_input, fits
from ._layer import Layer
from ._norm import _parameter, _reset
from ._parameters import as_asked


class GroupedLinear(Layer):
    """One linear layer per expert, each on its own tokens.

    Parameters are ``weight0``, ``bias0``, ``weight1``, …
    """

    weight0: Tensor

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        recipe: Union[str, nvfp4.Recipe] = "nvfp4",
        path: str = "experts",
    ):
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        for expert in range(num_gemms):
            setattr(self, f"weight{expert}", _parameter(out_features, in_features, device=device, dtype=dtype))
            of_expert = _parameter(out_features, device=device, dtype=dtype) if bias else None
            self.register_parameter(f"bias{expert}", of_expert)
        self.path = path
        self.reset_parameters()
        self.use_recipe(recipe)
        as_asked(self)

    def reset_parameters(self) -> None:
        """Initializes the parameters again."""
        for expert in range(self.num_gemms):
            _reset(getattr(self, f"weight{expert}"), getattr(self, f"bias{expert}"))

    @classmethod
    def sites_of(cls, layer: torch.nn.Module, path: str) -> List[Tuple]:
        return [(path, "grouped", layer.num_gemms)]

    def products(self) -> List[Tuple[str, str, Formats]]:
        return [(f"expert{expert}_", f"{self.path}:{{}}[{expert}]", of) for expert, of in enumerate(self.formats)]

    def follow_plan(self, plan: nvfp4.Plan) -> None:
        self.formats = [formats_of(plan, self.path, expert) for expert in range(self.num_gemms)]

    def weights(self) -> List[str]:
        return [f"weight{expert}" for expert in range(self.num_gemms)]

    def forward(self, input: Tensor, m_splits: List[int]) -> Tensor:
        """``m_splits`` has the number of tokens of each expert; tokens are sorted by expert."""
        if not fits(input, self.weight0):
            quantizes = any(formats.quantizes for formats in self.formats)
            check_input(input, self.weight0, self.path + ":{}", quantizes)
        x = input.reshape(-1, self.in_features)
        splits = list(m_splits)
        if len(splits) != self.num_gemms or sum(splits) != x.shape[0] or min(splits) < 0:
            raise ValueError(
                f"{self.path}:m_splits: expected {self.num_gemms} numbers of tokens "
                f"that add up to {x.shape[0]}, got {splits}"
            )
        parts = torch.split(x, splits)
        outputs = [self._expert(expert, tokens) for expert, tokens in enumerate(parts)]
        return shaped(torch.cat(outputs), (*input.shape[:-1], self.out_features))

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        return self.product(tokens, getattr(self, f"weight{expert}"), getattr(self, f"bias{expert}"), expert)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias0 is not None}, {self.formats[0]}"
        )

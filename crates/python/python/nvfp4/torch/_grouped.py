"""Several linear layers, one per expert."""

from __future__ import annotations

from typing import List, Union

import torch
from torch import Tensor

import nvfp4

from ._delayed import Delays
from ._formats import formats_of, plan_of
from ._function import linear
from ._norm import _bias, _weight


class GroupedLinear(Delays):
    """One linear layer per expert, each on its own tokens. Parameters are ``weight0``, ``bias0``, ``weight1``, …"""

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
        self.seed, self.amax_group = 0, None
        for expert in range(num_gemms):
            setattr(self, f"weight{expert}", _weight(out_features, in_features, device, dtype))
            self.register_parameter(f"bias{expert}", _bias(out_features, bias, device, dtype))
        self.path = path
        self.use_recipe(recipe)

    def use_recipe(self, recipe: Union[str, nvfp4.Recipe]) -> None:
        """Goes over to another recipe."""
        plan = plan_of(recipe, [(self.path, "grouped", self.num_gemms)])
        self.formats = [formats_of(plan, self.path, expert) for expert in range(self.num_gemms)]
        prefixes = {f"expert{expert}_": formats for expert, formats in enumerate(self.formats)}
        self.keep_scales(prefixes, self.weight0.device)

    def forward(self, input: Tensor, m_splits: List[int]) -> Tensor:
        """``m_splits`` says how many tokens each expert has; tokens lie expert after expert."""
        x = input.reshape(-1, self.in_features)
        if len(m_splits) != self.num_gemms or sum(m_splits) != x.shape[0]:
            raise ValueError(
                f"m_splits: expected {self.num_gemms} numbers that add up to {x.shape[0]} tokens, got {list(m_splits)}"
            )
        parts = torch.split(x, list(m_splits))
        outputs = [self._expert(expert, tokens) for expert, tokens in enumerate(parts)]
        return torch.cat(outputs).reshape(*input.shape[:-1], self.out_features)

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        weight, bias = getattr(self, f"weight{expert}"), getattr(self, f"bias{expert}")
        formats, state = self.formats[expert], self.state_of(self.formats[expert], f"expert{expert}_")
        return linear(tokens, weight, bias, formats, self.seed, self.amax_group, state)

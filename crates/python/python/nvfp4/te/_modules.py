"""Modules under TransformerEngine's names, which follow ``autocast``."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from torch import Tensor

import nvfp4
import nvfp4.torch
from nvfp4.torch._delayed import update

from ._recipe import Step, region


class _Follows:
    """A module that computes in the formats of the ``autocast`` around its call, and in high precision outside of one."""

    use_recipe: Callable[[Any], None]
    amax_group: Any
    _followed: Optional[nvfp4.Recipe] = None
    _step: Optional[Step] = None

    def __getstate__(self):
        # The next call finds out what to follow: that is no part of what is saved or copied.
        return {name: value for name, value in self.__dict__.items() if name not in ("_followed", "_step")}

    def follow(self) -> None:
        here, before = region(), self._step
        begins = here.step is not None and here.step is not before
        if begins and before is not None:
            before.end()
        if self._followed is None or self._followed != here.recipe:
            self.use_recipe(here.recipe)
        self._followed, self.amax_group = here.recipe, here.group
        if begins and before is None:
            update([(self, here.group)])  # what it saw before it was saved or copied, if it was
        if begins and here.step is not None:
            self._step = here.step
            here.step.modules[id(self)] = (self, here.group)


class Linear(_Follows, nvfp4.torch.Linear):
    """``transformer_engine.pytorch.Linear``."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, params_dtype=None, device=None,
        name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(
            in_features, out_features, bias, device, params_dtype, recipe="high_precision", path=name or "linear"
        )

    # The arguments are TransformerEngine's.
    def forward(  # type: ignore[override]
        self, inp: Tensor, is_first_microbatch: Optional[bool] = None
    ) -> Tensor:
        self.follow()
        return super().forward(inp)


class LayerNormLinear(_Follows, nvfp4.torch.LayerNormLinear):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = True, *,
        normalization: str = "LayerNorm", params_dtype=None, device=None, name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(
            in_features, out_features, eps, bias, normalization, device, params_dtype,
            recipe="high_precision", path=name or "layernorm_linear",
        )  # fmt: skip

    def forward(self, inp: Tensor, is_first_microbatch: Optional[bool] = None) -> Tensor:
        self.follow()
        return super().forward(inp)


class LayerNormMLP(_Follows, nvfp4.torch.LayerNormMLP):
    """``transformer_engine.pytorch.LayerNormMLP``."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, bias: bool = True, *,
        normalization: str = "LayerNorm", activation: str = "gelu", params_dtype=None, device=None,
        name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(
            hidden_size, ffn_hidden_size, eps, bias, normalization, activation, device, params_dtype,
            recipe="high_precision", path=name or "layernorm_mlp",
        )  # fmt: skip

    def forward(self, inp: Tensor, is_first_microbatch: Optional[bool] = None) -> Tensor:
        self.follow()
        return super().forward(inp)


class GroupedLinear(_Follows, nvfp4.torch.GroupedLinear):
    """``transformer_engine.pytorch.GroupedLinear``."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool = True, *, params_dtype=None,
        device=None, name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(
            num_gemms, in_features, out_features, bias, device, params_dtype,
            recipe="high_precision", path=name or "grouped_linear",
        )  # fmt: skip

    def forward(self, inp: Tensor, m_splits: List[int], is_first_microbatch: Optional[bool] = None) -> Tensor:
        self.follow()
        return super().forward(inp, m_splits)

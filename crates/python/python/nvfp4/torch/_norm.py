"""Layers that begin with a norm."""

from __future__ import annotations

from typing import Callable, Union

import torch
from torch import Tensor
from torch.nn import functional

import nvfp4

from ._delayed import Delays
from ._formats import formats_of, linear_formats, plan_of
from ._function import linear

_ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


class _Norm(Delays):
    """The norm's parameters, under TransformerEngine's names: ``layer_norm_weight`` and ``layer_norm_bias``."""

    def __init__(self, size: int, eps: float, normalization: str, device, dtype):
        super().__init__()
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"unknown normalization '{normalization}'; there are 'LayerNorm', 'RMSNorm'")
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        bias = torch.nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
        self.layer_norm_bias = bias if normalization == "LayerNorm" else None
        self.seed = 0
        self.amax_group = None

    def normalized(self, x: Tensor) -> Tensor:
        size = self.layer_norm_weight.shape
        if self.normalization == "RMSNorm":
            return functional.rms_norm(x, size, self.layer_norm_weight, self.eps)
        return functional.layer_norm(x, size, self.layer_norm_weight, self.layer_norm_bias, self.eps)


def _weight(rows: int, cols: int, device, dtype) -> torch.nn.Parameter:
    weight = torch.empty(rows, cols, device=device, dtype=dtype)
    return torch.nn.Parameter(torch.nn.init.kaiming_uniform_(weight, a=5**0.5))


def _bias(rows: int, bias: bool, device, dtype):
    return torch.nn.Parameter(torch.zeros(rows, device=device, dtype=dtype)) if bias else None


class LayerNormLinear(_Norm):
    """A norm and a linear layer: ``linear(norm(x))``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device=None,
        dtype=None,
        *,
        recipe: Union[str, nvfp4.Recipe] = "nvfp4",
        path: str = "linear",
    ):
        super().__init__(in_features, eps, normalization, device, dtype)
        self.weight = _weight(out_features, in_features, device, dtype)
        self.bias = _bias(out_features, bias, device, dtype)
        self.path = path
        self.use_recipe(recipe)

    def use_recipe(self, recipe: Union[str, nvfp4.Recipe]) -> None:
        """Goes over to another recipe."""
        self.formats = linear_formats(recipe, self.path)
        self.keep_scales({"": self.formats}, self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        x, state = self.normalized(input), self.state_of(self.formats)
        return linear(x, self.weight, self.bias, self.formats, self.seed, self.amax_group, state)


class LayerNormMLP(_Norm):
    """A norm, a linear layer, an activation and another linear layer: ``fc2(activation(fc1(norm(x))))``."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: Union[str, Callable[[Tensor], Tensor]] = "gelu",
        device=None,
        dtype=None,
        *,
        recipe: Union[str, nvfp4.Recipe] = "nvfp4",
        path: str = "mlp",
    ):
        super().__init__(hidden_size, eps, normalization, device, dtype)
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            known = ", ".join(f"'{name}'" for name in _ACTIVATIONS)
            raise ValueError(f"unknown activation '{activation}'; there are {known}")
        wide = 2 * ffn_hidden_size if activation == "swiglu" else ffn_hidden_size
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.fc1_weight = _weight(wide, hidden_size, device, dtype)
        self.fc1_bias = _bias(wide, bias, device, dtype)
        self.fc2_weight = _weight(hidden_size, ffn_hidden_size, device, dtype)
        self.fc2_bias = _bias(hidden_size, bias, device, dtype)
        self.path = path
        self.use_recipe(recipe)

    def use_recipe(self, recipe: Union[str, nvfp4.Recipe]) -> None:
        """Goes over to another recipe."""
        fc1, fc2 = f"{self.path}.fc1", f"{self.path}.fc2"
        plan = plan_of(recipe, [(fc1, "linear"), (fc2, "linear")])
        self.fc1_formats, self.fc2_formats = formats_of(plan, fc1), formats_of(plan, fc2)
        self.keep_scales({"fc1_": self.fc1_formats, "fc2_": self.fc2_formats}, self.fc1_weight.device)

    def forward(self, input: Tensor) -> Tensor:
        fc1, fc2 = self.state_of(self.fc1_formats, "fc1_"), self.state_of(self.fc2_formats, "fc2_")
        x = self.normalized(input)
        x = linear(x, self.fc1_weight, self.fc1_bias, self.fc1_formats, self.seed, self.amax_group, fc1)
        x = self.activation(x)
        return linear(x, self.fc2_weight, self.fc2_bias, self.fc2_formats, self.seed, self.amax_group, fc2)

"""Layers that begin with a norm."""

from __future__ import annotations

from typing import Callable, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional

import nvfp4

from ._activations import inputs_of, named
from ._formats import Formats, formats_of
from ._inputs import check_input, fits
from ._layer import Layer
from ._linear import OneProduct
from ._parameters import as_asked


class _Norm(Layer):
    """The norm's parameters, under TransformerEngine's names: ``layer_norm_weight`` and
    ``layer_norm_bias``.
    """

    layer_norm_bias: Optional[Tensor]

    def __init__(self, size: int, eps: float, normalization: str, device, dtype):
        super().__init__()
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"unknown normalization '{normalization}'; there are 'LayerNorm', 'RMSNorm'")
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = _parameter(size, device=device, dtype=dtype)
        bias = _parameter(size, device=device, dtype=dtype) if normalization == "LayerNorm" else None
        self.register_parameter("layer_norm_bias", bias)

    def reset_parameters(self) -> None:
        """Initializes the parameters again."""
        torch.nn.init.ones_(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def check(self, x: Tensor) -> None:
        """Refuses an input that has not the norm's features, or a type that nothing is computed in."""
        if not fits(x, self.layer_norm_weight):
            quantizes = any(formats.quantizes for _, _, formats in self._products)
            check_input(x, self.layer_norm_weight, self.path + ":{}", quantizes)

    def normalized(self, x: Tensor) -> Tensor:
        self.check(x)
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if hasattr(weight, "device_mesh"):  # a DTensor, which not every torch has
            from ._spread import spread_norm

            return spread_norm(x, weight, bias, self._norm)
        return self._norm(x, weight, bias)

    def _norm(self, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return norm(x, weight, bias, self.normalization, self.eps)


def norm(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], normalization: str, eps: float
) -> Tensor:
    """A norm over the dimensions of its weight, as torch has it.

    On CPUs torch adds the gradients of a LayerNorm in the type of its input: in bfloat16, a sum of
    ones ends at 256. So what has 16 bits is computed in 32 there.
    """
    if normalization == "RMSNorm":
        # Torch's sums follow the memory.
        return functional.rms_norm(x.contiguous(), weight.shape, weight, eps)
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    shift = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)


def _parameter(*shape: int, device, dtype) -> torch.nn.Parameter:
    """A parameter that has no numbers yet."""
    return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))


def _reset(weight: Tensor, bias: Optional[Tensor]) -> None:
    torch.nn.init.kaiming_uniform_(weight, a=5**0.5)
    if bias is not None:
        torch.nn.init.zeros_(bias)


class LayerNormLinear(OneProduct, _Norm):
    """A norm and a linear layer: ``linear(norm(x))``."""

    bias: Optional[Tensor]

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
        self.weight = _parameter(out_features, in_features, device=device, dtype=dtype)
        self.register_parameter("bias", _parameter(out_features, device=device, dtype=dtype) if bias else None)
        self.path = path
        self.reset_parameters()
        self.use_recipe(recipe)
        as_asked(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _reset(self.weight, self.bias)

    def weights(self) -> List[str]:
        return ["weight"]

    def forward(self, input: Tensor) -> Tensor:
        return self.product(self.normalized(input), self.weight, self.bias)

    def extra_repr(self) -> str:
        rows, cols = self.weight.shape
        return (
            f"in_features={cols}, out_features={rows}, bias={self.bias is not None}, "
            f"normalization={self.normalization}, eps={self.eps}, {self.formats}"
        )


class LayerNormMLP(_Norm):
    """A norm, two linear layers and an activation: ``fc2(activation(fc1(norm(x))))``."""

    fc1_weight: Tensor
    fc1_bias: Optional[Tensor]
    fc2_weight: Tensor
    fc2_bias: Optional[Tensor]

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
        self.activation = named(activation) if isinstance(activation, str) else activation
        wide = ffn_hidden_size * inputs_of(activation)
        for name, rows, cols in (("fc1", wide, hidden_size), ("fc2", hidden_size, ffn_hidden_size)):
            setattr(self, f"{name}_weight", _parameter(rows, cols, device=device, dtype=dtype))
            self.register_parameter(f"{name}_bias", _parameter(rows, device=device, dtype=dtype) if bias else None)
        self.path = path
        self.reset_parameters()
        self.use_recipe(recipe)
        as_asked(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _reset(self.fc1_weight, self.fc1_bias)
        _reset(self.fc2_weight, self.fc2_bias)

    @classmethod
    def sites_of(cls, layer: torch.nn.Module, path: str) -> List[Tuple]:
        return [(f"{path}.fc1", "linear"), (f"{path}.fc2", "linear")]

    def products(self) -> List[Tuple[str, str, Formats]]:
        return [
            ("fc1_", self.path + ".fc1:{}", self.fc1_formats),
            ("fc2_", self.path + ".fc2:{}", self.fc2_formats),
        ]

    def follow_plan(self, plan: nvfp4.Plan) -> None:
        self.fc1_formats, self.fc2_formats = (formats_of(plan, f"{self.path}.{name}") for name in ("fc1", "fc2"))

    def weights(self) -> List[str]:
        return ["fc1_weight", "fc2_weight"]

    def forward(self, input: Tensor) -> Tensor:
        x = self.product(self.normalized(input), self.fc1_weight, self.fc1_bias, 0)
        return self.product(self.activation(x), self.fc2_weight, self.fc2_bias, 1)

    def extra_repr(self) -> str:
        hidden, wide = self.fc2_weight.shape
        activation = getattr(self.activation, "__name__", repr(self.activation))
        return (
            f"hidden_size={hidden}, ffn_hidden_size={wide}, bias={self.fc1_bias is not None}, "
            f"normalization={self.normalization}, activation={activation}, eps={self.eps}, "
            f"fc1: {self.fc1_formats}, fc2: {self.fc2_formats}"
        )

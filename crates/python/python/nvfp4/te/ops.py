"""Operations under TransformerEngine's names: ``transformer_engine.pytorch.ops``.

>>> import torch, nvfp4.te as te
>>> from nvfp4.te import ops
>>> mlp = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64))
>>> with te.autocast(recipe=te.MXFP8BlockScaling()):
...     mlp(torch.randn(32, 64)).shape
torch.Size([32, 64])

Each is computed by itself, one after the other: nothing is fused, and the numbers are those of
TransformerEngine's unfused operations. Linear ones follow ``autocast`` as ``te.Linear`` does.
"""

from __future__ import annotations

from typing import Any, Callable, ClassVar, Dict, Iterable, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4.torch._activations import named

from . import _linear, _norms
from ._machine import place
from ._states import RecipeState
from ._tensor import QuantizedTensor
from ._parallel import one_worker
from ._recipe import region
from ._signature import refuse, supports
from .recipe import Recipe

__all__ = [
    "AddExtraInput", "BasicLinear", "BasicOperation", "Bias", "ConstantScale", "Dropout",
    "FusibleOperation", "GEGLU", "GELU", "GLU", "Identity", "L2Normalization", "LayerNorm",
    "Linear", "MakeExtraOutput", "QGEGLU", "QGELU", "Quantize", "RMSNorm", "ReGLU", "ReLU",
    "Reshape", "SReGLU", "SReLU", "Sequential", "SiLU", "SwiGLU",
]  # fmt: skip


class FusibleOperation(torch.nn.Module):
    """An operation of a tensor, and of others that are given beside it."""

    # How many tensors it takes and gives beside the one that all operations do.
    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0


class BasicOperation(FusibleOperation):
    """An operation that is not made of others."""


class _Quantized(FusibleOperation):
    """A linear layer as an operation: it is called with the tensor alone."""

    def get_quantizer(self, mode: str, index: int) -> Any:
        """The quantizer of a tensor of the last recipe: "forward" of the input and the weight,
        "backward" of the output's gradient.
        """
        key = "scaling_fwd" if mode == "forward" else "scaling_bwd"
        return self.quantizers[key][index]  # type: ignore[index]

    @property
    def _fp8_metas(self) -> Dict[str, Any]:
        return {"forward": self.fp8_meta, "backward": self.fp8_meta}


def _one_worker(where: str, mode: Optional[str], group: Any) -> None:
    if mode is not None:
        size = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
        one_worker(where, size, group)


class Linear(_Quantized, _linear.Linear):
    """``y = x·wᵀ + bias``."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, device: Any = None,
        dtype: Optional[torch.dtype] = None, tensor_parallel_mode: Optional[str] = None,
        tensor_parallel_group: Any = None, sequence_parallel: bool = False,
        rng_state_tracker_function: Optional[Callable[[], Any]] = None,
        accumulate_into_main_grad: bool = False, name: Optional[str] = None,
    ):  # fmt: skip
        _one_worker("ops.Linear", tensor_parallel_mode, tensor_parallel_group)
        super().__init__(
            in_features, out_features, bias=bias, device=device, params_dtype=dtype,
            get_rng_state_tracker=rng_state_tracker_function, name=name,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input)


class BasicLinear(Linear, BasicOperation):
    """``y = x·wᵀ``."""

    def __init__(
        self, in_features: int, out_features: int, *, userbuffers_options: Any = None, **given: Any
    ):
        refuse("ops.BasicLinear", "userbuffers_options", userbuffers_options, None)
        super().__init__(in_features, out_features, bias=False, **given)


class Bias(BasicOperation):
    """``y = x + bias``."""

    @supports("device", "dtype")
    def __init__(
        self, size: int, *, device: Any = None, dtype: Optional[torch.dtype] = None,
        tensor_parallel: bool = False, tensor_parallel_group: Any = None,
    ):  # fmt: skip
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(size, device=place(device), dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        return input + self.bias.to(input.dtype)


class LayerNorm(_norms.LayerNorm, BasicOperation):
    """``te.LayerNorm`` as an operation."""


class RMSNorm(_norms.RMSNorm, BasicOperation):
    """``te.RMSNorm`` as an operation."""


class L2Normalization(BasicOperation):
    """``y = x / √(Σx² + eps)`` along the last dimension, computed in binary32."""

    def __init__(
        self, *, eps: float = 1e-6, seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None,
    ):  # fmt: skip
        super().__init__()
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        x = input.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)).to(input.dtype)


class _Activation(BasicOperation):
    # Its name among the activations of MLPs.
    _name: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False):
        super().__init__()
        refuse(f"ops.{type(self).__name__}", "cache_quantized_input", cache_quantized_input, False)

    def forward(self, input: Tensor) -> Tensor:
        return named(self._name)(input)


def _activation(name: str) -> type:
    says = f"The activation {name}."
    of = {"_name": name.lower(), "__doc__": says, "__module__": __name__}
    return type(name, (_Activation,), of)


GELU, GEGLU, GLU = _activation("GELU"), _activation("GEGLU"), _activation("GLU")
QGELU, QGEGLU = _activation("QGELU"), _activation("QGEGLU")
ReLU, ReGLU = _activation("ReLU"), _activation("ReGLU")
SReLU, SReGLU = _activation("SReLU"), _activation("SReGLU")
SiLU, SwiGLU = _activation("SiLU"), _activation("SwiGLU")


class Identity(BasicOperation):
    """The tensor itself."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class ConstantScale(BasicOperation):
    """``y = scale·x``."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return input * self.scale


class Dropout(BasicOperation):
    """Dropout, in training."""

    def __init__(self, p: float):
        super().__init__()
        self.dropout_probability = p

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.dropout_probability, self.training)


class Reshape(BasicOperation):
    """The tensor in another shape."""

    def __init__(self, shape: Iterable[int]):
        super().__init__()
        self._shape = tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        return input.reshape(self._shape)


class AddExtraInput(BasicOperation):
    """The sum with a tensor that is given beside."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False):
        super().__init__()

    def forward(self, input: Tensor, extra: Tensor) -> Tensor:
        return input + extra


class MakeExtraOutput(BasicOperation):
    """The tensor, which is an output too."""

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False):
        super().__init__()

    def forward(self, input: Tensor) -> Tuple[Tensor, Tensor]:
        return input, input.view_as(input)


class _RoundedGradient(torch.autograd.Function):
    """The tensor, whose gradient has the numbers that codes stand for."""

    @staticmethod
    def forward(ctx, x, quantizer):
        ctx.quantizer = quantizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.quantizer(dy).dequantize(dtype=dy.dtype), None


class Quantize(BasicOperation):
    """Quantizes a tensor, its gradient, or both, as the recipe around the call says. It gives a
    tensor of codes, or their numbers in a compiled function; a gradient gets the numbers of its codes.
    """

    def __init__(self, forward: bool = True, backward: bool = False):
        super().__init__()
        self._quantizes = {"forward": forward, "backward": backward}

    def forward(self, input: Tensor) -> Tensor:
        asked = region().asked
        if not isinstance(asked, Recipe):
            return input
        forward, backward = (self._quantizer(asked, mode) for mode in ("forward", "backward"))
        y = input if backward is None else _RoundedGradient.apply(input, backward)
        if forward is None or isinstance(y, QuantizedTensor):
            return y
        # Compilers want gradients of the kind of what leaves a graph.
        compiling = torch.compiler.is_compiling()
        return forward(y).dequantize(dtype=y.dtype) if compiling else forward(y)

    def _quantizer(self, asked: Any, mode: str) -> Any:
        kept = asked.backward_override is not None and mode == "backward"
        if kept or not self._quantizes[mode]:
            return None
        if asked.delayed():
            raise NotImplementedError("te.ops.Quantize: delayed scaling is not supported here")
        state = RecipeState.create(asked, mode=mode, num_quantizers=1, roles=[None])
        return state.make_quantizers()[0]


class Sequential(torch.nn.Sequential):
    """Operations and modules, one after the other. Tensors that operations take beside are given
    in their order; those that they give beside come after the result.
    """

    def __init__(self, *args: Any):
        if len(args) == 1 and isinstance(args[0], dict):
            super().__init__()
            for key, module in args[0].items():
                self.add_module(key, module)
        else:
            super().__init__(*args)

    def forward(  # type: ignore[override]
        self, input: Tensor, *extra_inputs: Tensor
    ) -> Union[Tensor, Tuple[Tensor, ...]]:
        left, beside = list(extra_inputs), []  # type: List[Tensor], List[Tensor]
        for module in self:
            number = getattr(module, "num_extra_inputs", 0)
            if len(left) < number:
                raise ValueError(
                    f"{type(module).__name__}: expected {number} tensors beside its input, got "
                    f"{len(left)}"
                )
            taken, left = left[:number], left[number:]
            made = module(input, *taken)
            if getattr(module, "num_extra_outputs", 0):
                input, *more = made
                beside += more
            else:
                input = made
        if left:
            raise ValueError(f"Sequential: {len(left)} tensors beside the input are not used")
        return (input, *beside) if beside else input

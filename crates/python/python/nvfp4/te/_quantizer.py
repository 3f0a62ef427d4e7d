"""What all quantizers have, under TransformerEngine's names."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4
from nvfp4.torch._composed import quantized
from nvfp4.torch._formats import Format

from ._left_out import left_out


class Quantizer:
    """What all quantizers have: the directions of the next tensor, and a spec.

    A tensor that is ``internal`` is a storage, which torch does not see as a tensor. Scales of a
    tensor that one wants to ``optimize_for_gemm`` have the order of tensor cores.
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool
    # The storage and the tensor that it makes.
    _CLASSES: ClassVar[Tuple[Any, Any]]

    amax_reduction_group: Any

    def __init__(self, *, rowwise: bool, columnwise: bool):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rowwise_usage={self.rowwise_usage}, "
            f"columnwise_usage={self.columnwise_usage}, internal={self.internal})"
        )

    def __getstate__(self):
        # Groups of workers belong to a process.
        return {n: None if n == "amax_reduction_group" else v for n, v in self.__dict__.items()}

    def spec(self) -> str:
        """The format in recipe syntax."""
        raise NotImplementedError(
            f"{type(self).__name__} has no format: use a class that derives from Quantizer"
        )

    def row_spec(self) -> str:
        """The format of the row direction alone."""
        return self.spec()

    def copy(self) -> Any:
        """Another one with the same settings."""
        new = type(self).__new__(type(self))
        # A method that was replaced stays with the one that it was replaced on. The module with the
        # scale of delayed scaling can be called too, but is none.
        settings = {
            name: value
            for name, value in self.__dict__.items()
            if isinstance(value, torch.nn.Module) or not callable(value)
        }
        new.__dict__.update(settings)
        return new

    # Directions.

    def set_usage(
        self, *, rowwise: Optional[bool] = None, columnwise: Optional[bool] = None
    ) -> None:
        """Chooses the directions of the next tensor."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> Dict[str, bool]:
        """The directions of the next tensor."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    @property
    def directions(self) -> str:
        """The directions that are chosen, as ``nvfp4.Quantizer`` names them."""
        usage = (self.rowwise_usage, self.columnwise_usage)
        if usage == (False, False):
            raise ValueError(
                "neither direction is used: set_usage(rowwise=True), columnwise=True or both"
            )
        return {(True, True): "both", (True, False): "row", (False, True): "column"}[usage]

    # Quantization.

    def __call__(self, tensor: Tensor) -> Any:
        return self.quantize(tensor)

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: Any = None) -> Any:
        """Quantizes a tensor in the directions that are chosen, into ``out`` if it is given."""
        if out is not None:
            return self.update_quantized(tensor, out)
        if self.internal or not torch.is_grad_enabled():
            made = self.quantize_impl(tensor)
        else:
            made = _Quantize.apply(tensor, self.quantize_impl)
        own: Any = getattr(made, "_quantizer", None)
        if getattr(own, "with_amax_reduction", False):
            own.with_amax_reduction, own.amax_reduction_group = False, None
        return made

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Quantizes a tensor, without a gradient."""
        if type(self).spec is Quantizer.spec:
            self.spec()  # which says what is missing
        tensor = plain(tensor)
        return self.wrapped(self.arrays(tensor), tensor.shape, tensor.dtype)

    def multi_quantize(self, list_of_tensors: Iterable[Tensor]) -> List[Any]:
        """Quantizes some tensors."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Optional[Tensor] = None) -> Any:
        """Quantizes a tensor into another one. A ``noop_flag`` that is not 0 leaves it as it is."""
        if not isinstance(dst, self._CLASSES[0]):
            raise ValueError(
                f"{type(self).__name__} can only update {self._CLASSES[0].__name__}, "
                f"not {type(dst).__name__}"
            )
        group = getattr(dst, "amax_reduction_group", None)
        quantizer = self
        if group is not None and hasattr(self, "with_amax_reduction"):
            quantizer = self.copy()
            quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
        values = plain(src).to(dst.device)
        if values.shape != dst.shape:
            values = values.expand(dst.shape).contiguous()
        dst._take(quantizer.arrays(values, noop_flag), noop_flag)
        dst._take_settings(self.storage_metadata(values.dtype)["nontensor_kwargs"])
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A tensor whose arrays are not filled, on torch's default device if none is named."""
        shape = tuple(shape)
        if getattr(self, "custom", False) or not hasattr(self, "_CLASSES"):
            raise NotImplementedError(
                f"{type(self).__name__} class does not implement make_empty function, "
                "required for construction of uninitialized quantized tensor"
            )
        made = self.wrapped(
            self.alloc_tensors(shape, device=device, pin_memory=pin_memory), shape, dtype
        )
        return made.requires_grad_(True) if requires_grad else made

    def arrays(self, tensor: Tensor, noop_flag: Optional[Tensor] = None) -> Dict[str, Tensor]:
        """What a tensor is stored as: arrays by their attributes."""
        group = None
        if getattr(self, "with_amax_reduction", False):
            group = self.amax_reduction_group or torch.distributed.group.WORLD
        format = format_of(self.spec(), self.directions)
        parts = quantized(matrix_of(tensor), format, group=group)
        return self.stored(parts[: format.row], parts[format.row :], tensor.shape)

    def stored(
        self, row: List[Tensor], column: List[Tensor], shape: torch.Size
    ) -> Dict[str, Tensor]:
        """The arrays of the engine as they are stored."""
        sides = {"row": row, "column": column}
        made = {}
        for side, parts in sides.items():
            if parts:
                made.update(self._CLASSES[0].stored(side, parts, shape, self))
        return made

    def wrapped(self, arrays: Dict[str, Tensor], shape: Iterable[int], dtype: torch.dtype) -> Any:
        """The tensor, or the storage, of some arrays."""
        given = self.storage_metadata(dtype)
        cls = given["cls"]
        named = {argument: arrays.get(name) for name, argument in cls._ARRAYS.items()}
        named.update(given["nontensor_kwargs"])
        if not issubclass(cls, Tensor):
            return cls(**named)
        device = next(array.device for array in arrays.values())
        return cls(shape=tuple(shape), dtype=dtype, device=device, **named)

    # What a tensor consists of, without data.

    def inner_tensor_specs(
        self, shape: Tuple[int, ...]
    ) -> Dict[str, Tuple[Tuple[int, ...], torch.dtype]]:
        """Shape and type of the arrays of a tensor."""
        raise NotImplementedError(f"{type(self).__name__} does not implement inner_tensor_specs")

    def storage_metadata(self, fake_dtype: torch.dtype) -> Dict[str, Any]:
        """The class of a tensor, and the arguments of its constructor that are no tensors."""
        settings = self._CLASSES[0]._settings_of(self)
        named = {"quantizer": self, "fake_dtype": fake_dtype, **settings}
        return {"cls": self._CLASSES[0 if self.internal else 1], "nontensor_kwargs": named}

    def alloc_tensors(
        self, shape: Iterable[int], *, device: Any = None, pin_memory: bool = False
    ) -> Dict[str, Tensor]:
        """The arrays of a tensor, not filled."""
        return {
            name: torch.empty(size, dtype=dtype, device=device, pin_memory=pin_memory)
            for name, (size, dtype) in self.inner_tensor_specs(tuple(shape)).items()
        }

    def create_metadata(
        self, _shape: Iterable[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> Dict[str, Any]:
        """What ``__tensor_unflatten__`` takes beside the arrays."""
        return {
            **self.storage_metadata(dtype),
            "is_tensor": not self.internal,
            "requires_grad": requires_grad,
        }

    # What others ask of it.

    def calibrate(self, tensor: Tensor) -> None:
        """Notes what a tensor would change, without quantizing it."""

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether workers may gather the codes of such a tensor."""
        return True

    def is_requantization_safe(self) -> bool:
        """Whether the same tensor gives the same codes again."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether workers gather the row direction alone."""
        return False

    onnx_quantize = left_out("onnx_quantize")
    onnx_dequantize = left_out("onnx_dequantize")

    def _get_compatible_recipe(self) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} class does not implement _get_compatible_recipe"
        )


@functools.lru_cache(maxsize=None)
def format_of(spec: str, directions: str) -> Format:
    """A format in some directions."""
    return Format.of(nvfp4.Quantizer(spec=spec, directions=directions))


def plain(tensor: Any) -> Tensor:
    """The values of a tensor, side by side and without a gradient."""
    if not isinstance(tensor, Tensor) or hasattr(tensor, "_quantizer"):
        tensor = tensor.dequantize()
    return tensor.detach().contiguous()


def matrix_shape(shape: Iterable[int]) -> Tuple[int, int]:
    """The matrix of a tensor: its last dimension, and all others."""
    *lead, last = tuple(shape) or (1,)
    return math.prod(lead), last


def matrix_of(tensor: Tensor) -> Tensor:
    """A tensor as a matrix."""
    return tensor.reshape(matrix_shape(tensor.shape))


def up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def whole_blocks(tensor: Tensor, block: int) -> bool:
    """Whether a matrix divides into blocks in both directions."""
    rows, cols = matrix_shape(tensor.shape)
    return tensor.dim() >= 2 and rows % block == 0 and cols % block == 0


class _Quantize(torch.autograd.Function):
    """Quantizes; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, tensor, quantize):
        return quantize(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None

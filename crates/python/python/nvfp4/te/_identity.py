"""Tensors that are not quantized, where quantized ones are expected, under TransformerEngine's
names.
"""

from __future__ import annotations

from typing import Any, ClassVar, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

from ._quantizer import Quantizer, matrix_of
from ._storage import ArrayStorage
from ._tensor import ArrayTensor
from .recipe import CustomRecipe


class IdentityTensorStorage(ArrayStorage):
    """The values themselves, which serve both directions."""

    _ARRAYS = {"_hp_data": "hp_data"}
    _SETTINGS: ClassVar[Dict[str, str]] = {}
    _CODES = {"row": "_hp_data", "column": "_hp_data"}
    _SIDES = {"row": ("_hp_data",), "column": ("_hp_data",)}
    _hp_data: Any

    def __new__(
        cls,
        *args,
        hp_data: Optional[Tensor],
        fake_dtype: Optional[torch.dtype] = None,
        quantizer: Optional[Quantizer] = None,
        **kwargs,
    ):
        if fake_dtype is None and hp_data is not None and not issubclass(cls, Tensor):
            fake_dtype = hp_data.dtype
        return cls._made({"_hp_data": hp_data}, {}, quantizer, args, fake_dtype, kwargs)

    @classmethod
    def _settings_of(cls, quantizer: Any) -> Dict[str, Any]:
        return {}

    quantized = None  # type: ignore[assignment]  # nothing is

    def _parts(self, side: str) -> List[Tensor]:
        return [matrix_of(self._hp_data)]

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        if self._hp_data is None:
            raise RuntimeError(f"{type(self).__name__} has no data to dequantize")
        return self._hp_data.to(dtype)

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """The values themselves, cast if another type is asked for."""
        return self._decoded(self._dtype if dtype is None else dtype)

    def size(self, dim: Optional[int] = None) -> Any:
        if self._hp_data is None:
            raise RuntimeError(f"{type(self).__name__} has no data")
        return self._hp_data.size() if dim is None else self._hp_data.size(dim)

    def _stored_shape(self) -> torch.Size:
        return self.size()

    def _codes_in(self, shape: torch.Size) -> Optional[Dict[str, Tensor]]:
        return {"_hp_data": self._hp_data.view(shape)}

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        pass  # the values serve both

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        if not rowwise_data and not columnwise_data:
            raise ValueError("No data to get, both rowwise_data and columnwise_data are False")
        return (self._hp_data, None) if rowwise_data and columnwise_data else self._hp_data

    def fsdp_buffer_fields(self) -> Tuple[str, ...]:
        return ("_hp_data",)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(dtype={self._dtype}, data={self._hp_data})"


class IdentityTensor(IdentityTensorStorage, ArrayTensor):  # type: ignore[misc, override]
    """A tensor that is not quantized."""

    def _held(self, data: Tensor, requires_grad: bool = False) -> "IdentityTensor":
        """The same kind of tensor of other values."""
        return type(self)(
            shape=data.shape, dtype=self.dtype, hp_data=data, quantizer=self._quantizer,
            requires_grad=requires_grad, device=data.device, stride=data.stride(),
            storage_offset=data.storage_offset(),
        )  # fmt: skip

    def detach(self) -> "IdentityTensor":
        return self._held(self._hp_data.detach())

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        if self._hp_data.is_contiguous(memory_format=memory_format):
            return self
        return self._held(self._hp_data.contiguous(memory_format=memory_format), self.requires_grad)

    def clone(self, *, memory_format: Any = None) -> "IdentityTensor":
        return self._held(self._hp_data.detach().clone(), self.requires_grad)

    def _shaped(self, shape: torch.Size) -> Any:
        return self._held(self._hp_data.view(shape))

    def _cut(self, function, *args, **kwargs) -> Any:
        made = function(self._hp_data, *args, **kwargs)
        if isinstance(made, (list, tuple)):
            return type(made)(self._held(data) for data in made)
        return self._held(made)

    def fsdp_pre_all_gather(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        """What FSDP2 gathers: the values."""
        return (self._hp_data,), (self._quantizer,)

    def fsdp_post_all_gather(
        self, all_gather_outputs, metadata, param_dtype: torch.dtype, *, out: Any = None
    ):
        """The tensor of what FSDP2 gathered."""
        (data,), (quantizer,) = all_gather_outputs, metadata
        dtype = getattr(quantizer, "dtype", None) or param_dtype
        if data.dtype != dtype:
            raise RuntimeError(
                "IdentityTensor FSDP payload dtype does not match its logical dtype: "
                f"payload={data.dtype}, logical={dtype}."
            )
        if out is None:
            made = IdentityTensor(shape=data.shape, dtype=dtype, hp_data=data, quantizer=quantizer)
            return made, all_gather_outputs
        out._hp_data, out._dtype = data, dtype
        return out, all_gather_outputs


class IdentityQuantizer(Quantizer):
    """Leaves a tensor as it is, or casts it: for a tensor, or a direction, in high precision."""

    _CLASSES = (IdentityTensorStorage, IdentityTensor)

    def __init__(
        self,
        *,
        dtype: Optional[torch.dtype] = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def spec(self) -> str:
        if self.dtype is None:
            return "high-precision"
        if self.dtype not in _SHORT:
            raise ValueError(
                f"dtype: expected one of {', '.join(map(str, _SHORT))}, got {self.dtype}"
            )
        return f"high-precision({_SHORT[self.dtype]})"

    def _held(self, tensor: Tensor) -> Tensor:
        values = tensor.detach()
        values = values.dequantize() if hasattr(values, "_quantizer") else values
        return values if self.dtype is None else values.to(self.dtype)

    def quantize_impl(self, tensor: Tensor) -> Any:
        data = self._held(tensor)
        return self.wrapped({"_hp_data": data}, data.shape, data.dtype)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Optional[Tensor] = None) -> Any:
        if not isinstance(dst, IdentityTensorStorage):
            raise ValueError(
                f"IdentityQuantizer can only update IdentityTensorStorage, got {type(dst).__name__}"
            )
        data, old = self._held(src), dst._hp_data
        if old is not None and (old.shape, old.device) == (data.shape, data.device):
            if old.dtype != data.dtype:
                dst._hp_data = old = old.to(data.dtype)
            old.copy_(data if noop_flag is None else torch.where(noop_flag == 0, data, old))
        elif noop_flag is None or noop_flag.item() == 0:
            dst._hp_data = data
        dst._dtype = data.dtype
        return dst

    def inner_tensor_specs(
        self, shape: Tuple[int, ...]
    ) -> Dict[str, Tuple[Tuple[int, ...], torch.dtype]]:
        return {"_hp_data": (tuple(shape), self.dtype or torch.get_default_dtype())}

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        held = self.dtype or dtype
        data = torch.empty(tuple(shape), dtype=held, device=device, pin_memory=pin_memory)
        made = self.wrapped({"_hp_data": data}, data.shape, held)
        return made.requires_grad_(True) if requires_grad else made

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        return CustomRecipe


_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

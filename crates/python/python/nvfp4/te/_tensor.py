"""Quantized tensors that torch sees as tensors, under TransformerEngine's names."""

from __future__ import annotations

import copy
import math
from typing import Any, Dict, Iterable, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nvfp4.torch._changes import in_place

from ._storage import write
from ._views import Same, View, cloned, contiguous_strides, resolved

_aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """A quantized tensor with the shape, type and device that torch sees. Operations compute on its
    values; those in place quantize their result again.
    """

    _dtype: torch.dtype
    _quantizer: Any
    _get_quantizer: Any

    def __new__(
        cls,
        shape: Iterable[int],
        dtype: torch.dtype,
        *,
        fake_dtype: Optional[torch.dtype] = None,
        requires_grad: bool = False,
        device: Optional[torch.device] = None,
        stride: Optional[Iterable[int]] = None,
        storage_offset: int = 0,
    ):
        if fake_dtype is not None and fake_dtype != dtype:
            raise ValueError(f"fake_dtype ({fake_dtype}) does not match dtype ({dtype})")
        shape = tuple(shape)
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            shape,
            strides=contiguous_strides(shape) if stride is None else tuple(stride),
            storage_offset=storage_offset,
            dtype=dtype,
            requires_grad=requires_grad,
            device=torch.get_default_device() if device is None else device,
        )
        made._dtype = dtype
        return made

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The type of the values."""
        if not hasattr(self, "_dtype"):
            self._dtype = torch._C.TensorBase.dtype.__get__(self, type(self))  # type: ignore[attr-defined]
        return self._dtype

    # What a format has.

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:  # type: ignore[override]
        """The values."""
        raise NotImplementedError(
            f"{type(self).__name__} class does not implement dequantize function"
        )

    def quantize_(self, tensor: Tensor) -> Any:
        """Takes the values of another tensor."""
        raise NotImplementedError(
            f"{type(self).__name__} class does not implement quantize_ function"
        )

    def clear(self) -> None:
        """Frees the memory of the arrays."""
        raise NotImplementedError(f"{type(self).__name__} class does not implement clear function")

    def get_metadata(self) -> Dict[str, Any]:
        """The arguments of the constructor that make it again, of the same arrays."""
        raise NotImplementedError(
            f"{type(self).__name__} class does not implement get_metadata function"
        )

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        """The tensor, whose codes lie side by side."""
        raise NotImplementedError(
            f"{type(self).__name__} class does not implement contiguous function"
        )

    # What others have noted on it.

    def _noted(self) -> Dict[str, Any]:
        own = {
            *self.get_metadata(),
            "dtype",
            "prepared",
            "transpose_invalid",
            "scale_inv",
            "data",
            "transpose",
        }
        return {name: value for name, value in self.__dict__.items() if name.lstrip("_") not in own}

    def __deepcopy__(self, memo: Any) -> Any:
        made = cloned(self).requires_grad_(self.requires_grad)
        made.__dict__.update(copy.deepcopy(self._noted(), memo))
        return memo.setdefault(id(self), made)

    def __reduce_ex__(self, protocol: Any) -> Any:
        given = (type(self), tuple(self.shape), self.dtype, self.get_metadata())
        return rebuilt, (*given, self.requires_grad, self._noted())

    # The same in another form.

    @classmethod
    def make_like(
        cls,
        tensor: Any,
        *,
        shape: Optional[Iterable[int]] = None,
        dtype: Optional[torch.dtype] = None,
        requires_grad: bool = False,
    ) -> Any:
        """A tensor of the same arrays."""
        dtype = tensor.dtype if dtype is None else dtype
        kwargs = {**tensor.get_metadata(), "fake_dtype": dtype}
        shape = tensor.shape if shape is None else shape
        return cls(
            shape=shape, dtype=dtype, requires_grad=requires_grad, device=tensor.device, **kwargs
        )  # type: ignore[call-arg]

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """A tensor of the same arrays, with values of another type."""
        return type(self).make_like(self, dtype=dtype)

    def detach(self) -> Any:
        """A tensor of the same arrays, without a gradient."""
        return type(self).make_like(self)

    def float(self) -> Tensor:
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> Tensor:
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> Tensor:
        return self.dequantize(dtype=torch.float16)

    def cpu(self, memory_format=torch.preserve_format) -> Any:
        return self.to(device=torch.device("cpu"), memory_format=memory_format)

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty one: the arrays have their own."""
        return torch.UntypedStorage(0, device=self.device)

    def expand_as(self, other: Tensor) -> Tensor:  # type: ignore[override]
        # torch asks for the graph of a parameter so.
        return Same.apply(self) if other is self else super().expand_as(other)

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(data={self.dequantize()})"

    def _get_data(self) -> Any:
        return super().data

    @torch.no_grad()
    def _set_data(self, tensor: Any) -> None:
        if not isinstance(tensor, (type(self), QuantizedTensor)) or not self._adopts(tensor):
            if tensor.shape == self.shape and tensor.dtype == self.dtype:
                self.quantize_(tensor)
                return
            quantizer = self._get_quantizer().copy()
            quantizer.internal = False
            tensor = quantizer.quantize(tensor.to(self.device))
        # What torch itself keeps of a tensor.
        own: Any = torch._C.TensorBase
        here = [kept.__get__(self) for kept in (own.shape, own.dtype, own.device)]
        if here != [tensor.shape, tensor.dtype, tensor.device] or self.stride() != tensor.stride():
            empty = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                type(self),
                tensor.shape,
                strides=tensor.stride(),
                dtype=tensor.dtype,
                device=tensor.device,
            )
            own.data.__set__(self, empty)
        self._adopt(tensor)
        self._quantizer = None if tensor._quantizer is None else tensor._quantizer.copy()
        self._dtype = tensor.dtype

    def _adopts(self, tensor: Any) -> bool:
        """Whether the arrays of another tensor may become its own."""
        return isinstance(tensor, type(self)) or isinstance(self, type(tensor))

    def _adopt(self, tensor: Any) -> None:
        """Takes the arrays of another tensor as its own."""
        raise NotImplementedError(f"{type(self).__name__} class does not implement data")

    data = property(_get_data, _set_data)  # type: ignore[assignment]

    # Operations.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        made = NotImplemented if known is None else known(func, *args, **kwargs)
        if made is not NotImplemented:
            return made
        if func._schema.is_mutable:
            return in_place(func, args, kwargs, QuantizedTensor, _values, _take)
        args, kwargs = tree_map_only(QuantizedTensor, _values, (args, kwargs))
        return func(*args, **kwargs)

    def _shaped(self, shape: torch.Size) -> Any:
        """The same in another shape; None where it cannot be."""
        raise NotImplementedError(f"{type(self).__name__} class does not support tensor views")

    def _copied(self, source: Any) -> bool:
        """Takes the arrays of another tensor, if they fit."""
        return False

    def _zeros(self, size, dtype, device, pin_memory) -> Any:
        """A tensor of zeros of its kind; NotImplemented where it has no quantizer."""
        if self._quantizer is None:
            return NotImplemented
        made = _empty_of(self, self._quantizer.copy(), size, dtype, device, pin_memory)
        for array in made._arrays_there():
            array.zero_()
        return made

    def _cut(self, function, *args, **kwargs) -> Any:
        """Pieces of it; NotImplemented where they are pieces of the values."""
        return NotImplemented


class ArrayTensor(QuantizedTensor):
    """What tensors of all formats with arrays have."""

    _ARRAYS: Any
    _SETTINGS: Any
    _codes_in: Any
    _follow: Any
    get_data_tensors: Any
    get_usages: Any
    # The workers whose amax counts when it is quantized again.
    amax_reduction_group: Any = None

    def quantize_(self, tensor: Tensor, *, noop_flag: Optional[Tensor] = None) -> Any:
        """Takes the values of another tensor, unless a flag is not 0."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def clone(self, *, memory_format: Any = None) -> Any:
        return Same.apply(self, True)

    def reshape(self, *shape: Any) -> Any:  # type: ignore[override]
        return View.apply(self, shape)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        there = [a for a in self.get_data_tensors() if a is not None]
        if all(array.is_contiguous(memory_format=memory_format) for array in there):
            return self
        raise ValueError(f"{type(self).__name__} does not support different memory formats!")

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    def _shaped(self, shape: torch.Size) -> Any:
        codes = self._codes_in(shape)
        if codes is None:
            return None
        kwargs = self.get_metadata()
        kwargs.update({self._ARRAYS[name]: array for name, array in codes.items()})
        return type(self)(shape=shape, dtype=self.dtype, device=self.device, **kwargs)  # type: ignore[call-arg]

    def _copied(self, source: Any) -> bool:
        arrays: Dict[str, str] = getattr(source, "_ARRAYS", {})
        if arrays is not self._ARRAYS or self.shape != source.shape:
            return False
        here, there = self.get_usages(), source.get_usages()
        if any(here[side] and not there[side] for side in here):
            return False
        if any(getattr(self, name) != getattr(source, name) for name in self._SETTINGS):
            return False
        for name in arrays:
            old, new = getattr(self, name), getattr(source, name)
            if old is not None and new is not None:
                write(old, new.detach().reshape(old.shape))
        self._follow()
        return True

    def _adopt(self, tensor: Any) -> None:
        for name in (*self._ARRAYS, *self._SETTINGS):
            setattr(self, name, getattr(tensor, name))


def rebuilt(cls, shape, dtype, metadata, requires_grad=False, noted=None):
    """What pickles make."""
    made = cls(shape=shape, dtype=dtype, requires_grad=requires_grad, **metadata)
    made.__dict__.update(noted or {})
    return made


def _values(tensor: QuantizedTensor) -> Tensor:
    return tensor.dequantize()


def _take(tensor: QuantizedTensor, values: Tensor) -> None:
    tensor.quantize_(values)


# Operations that keep codes. They return NotImplemented where values are needed.


def _detach(function, tensor):
    return tensor.detach()


def _clone(function, tensor, memory_format=None):
    return cloned(tensor)


def _to(
    function, tensor, *, dtype=None, device=None, non_blocking=False, pin_memory=False, **kwargs
):
    if dtype is not None and dtype != tensor.dtype:
        return NotImplemented
    device = torch.device(tensor.device if device is None else device)

    def moved(value):
        if isinstance(value, QuantizedTensor):  # a direction of a tensor in two formats
            return _to(
                function, value, device=device, non_blocking=non_blocking, pin_memory=pin_memory
            )
        value = value.to(device=device, non_blocking=non_blocking)
        return value.pin_memory() if pin_memory and device.type == "cpu" else value

    named = {
        name: moved(value) if isinstance(value, Tensor) else value
        for name, value in tensor.get_metadata().items()
    }
    return type(tensor)(
        shape=tensor.shape,
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        device=device,
        **named,
    )


def _copy(function, target, source, non_blocking=False):
    if not isinstance(target, QuantizedTensor):
        known = (torch.float32, torch.float16, torch.bfloat16)
        dtype = target.dtype if target.dtype in known else torch.float32
        return target.copy_(source.dequantize(dtype=dtype), non_blocking)
    if target._copied(source):
        return target
    target.quantize_(source)
    return target


def _view(function, tensor, shape):
    new = resolved(tensor.shape, shape)
    if new == tensor.shape:
        return tensor.detach()
    made = tensor._shaped(new)
    return NotImplemented if made is None else made


def _strided(function, tensor, size, stride, storage_offset=None):
    if (
        tuple(size) == tuple(tensor.shape)
        and tuple(stride) == tuple(tensor.stride())
        and not storage_offset
    ):
        return type(tensor).make_like(tensor)
    return tensor._cut(function, size, stride, storage_offset)


def _slice(function, tensor, dim=0, start=None, end=None, step=1):
    if not start and (end is None or end >= tensor.shape[dim]) and step == 1:
        return type(tensor).make_like(tensor)
    return tensor._cut(function, dim, start, end, step)


def _cut(function, tensor, *args, **kwargs):
    return tensor._cut(function, *args, **kwargs)


def _new_empty(function, tensor, size, dtype=None, device=None, pin_memory=False, **kwargs):
    if tensor._quantizer is None:
        raise RuntimeError(
            f"{type(tensor).__name__} does not have a quantizer; cannot create new_empty "
            "QuantizedTensor"
        )
    return _empty_of(tensor, tensor._quantizer.copy(), size, dtype, device, pin_memory)


def _empty_like(function, tensor, dtype=None, device=None, pin_memory=False, **kwargs):
    if tensor._quantizer is None:
        return NotImplemented
    quantizer = tensor._quantizer.copy()
    quantizer.set_usage(**tensor.get_usages())
    return _empty_of(tensor, quantizer, tensor.shape, dtype, device, pin_memory)


def _empty_of(tensor, quantizer, shape, dtype, device, pin_memory):
    quantizer.internal = False
    return quantizer.make_empty(
        tuple(shape),
        dtype=dtype or tensor.dtype,
        device=tensor.device if device is None else device,
        pin_memory=bool(pin_memory),
    )


def _new_zeros(function, tensor, size, dtype=None, device=None, pin_memory=False, **kwargs):
    return tensor._zeros(tuple(size), dtype, device, pin_memory)


def _numel(function, tensor):
    return math.prod(tensor.shape)


def _is_pinned(function, tensor, *args, **kwargs):
    return any(array.is_pinned() for array in tensor._arrays_there())


def _record_stream(function, tensor, stream):
    for array in tensor._arrays_there():
        if array.is_cuda:
            array.record_stream(stream)


_KNOWN: Dict[Any, Any] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to,
    _aten.copy_.default: _copy,
    _aten.view.default: _view,
    _aten.as_strided.default: _strided,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _cut,
    _aten.split.Tensor: _cut,
    _aten.new_empty.default: _new_empty,
    _aten.empty_like.default: _empty_like,
    _aten.new_zeros.default: _new_zeros,
    _aten.numel.default: _numel,
    _aten.is_pinned.default: _is_pinned,
    _aten.record_stream.default: _record_stream,
}

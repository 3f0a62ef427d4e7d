"""What a quantized tensor consists of, under TransformerEngine's names."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4
from nvfp4.torch._blocks import block_of
from nvfp4.torch._quantized import dequantize_block

from ._quantizer import Quantizer, matrix_shape
from ._views import View, resolved


class QuantizedTensorStorage:
    """What is stored of a quantized tensor. A class of tensors derives from it and from
    ``QuantizedTensor``.
    """

    _dtype: torch.dtype
    _quantizer: Any

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        if isinstance(self, Tensor):
            return torch._C.TensorBase.shape.__get__(self, type(self))  # type: ignore[attr-defined]
        return torch.Size(self.size())  # type: ignore[attr-defined]

    def _missing(self, name: str) -> Any:
        raise NotImplementedError(f"{type(self).__name__} class does not implement {name} function")

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        """Drops a direction, or makes it if it follows from the other one."""
        self._missing("update_usage")

    def get_usages(self) -> Dict[str, bool]:
        """The directions that are there."""
        return self._missing("get_usages")

    def prepare_for_saving(self) -> Tuple[List[Optional[Tensor]], "QuantizedTensorStorage"]:
        """Gives its arrays away, for ``save_for_backward``."""
        return self._missing("prepare_for_saving")

    def restore_from_saved(self, tensors: List[Optional[Tensor]]) -> List[Optional[Tensor]]:
        """Takes its arrays back, and returns the tensors after them."""
        return self._missing("restore_from_saved")

    def copy_from_storage(self, src: "QuantizedTensorStorage") -> None:
        """Copies the arrays of another one."""
        self._missing("copy_from_storage")

    def _get_quantizer(self) -> Any:
        """Its quantizer, or the default one of its format."""
        return self._build_default_quantizer() if self._quantizer is None else self._quantizer

    def _build_default_quantizer(self) -> Any:
        raise ValueError(
            f"{type(self).__name__} has no quantizer and its format has no default one"
        )

    def quantize_(self, tensor: Tensor, *, noop_flag: Optional[Tensor] = None) -> Any:
        """Takes the values of another tensor, unless a flag is not 0."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Replaces the quantizer."""
        if self._quantizer is None:
            raise RuntimeError("To be updated, quantizer must be set")
        if self._quantizer is not quantizer:
            warnings.warn(
                "Quantizer is being updated, this may affect model behavior", stacklevel=2
            )
            self._quantizer = quantizer

    # What FSDP2 gathers.

    def fsdp_buffer_fields(self) -> Tuple[str, ...]:
        """The attributes of the arrays that workers gather."""
        return self._missing("fsdp_buffer_fields")

    def fsdp_extract_buffers(self) -> Tuple[Tuple[Optional[Tensor], ...], Dict[str, Any]]:
        """The arrays that workers gather, and what puts them together again."""
        names = self.fsdp_buffer_fields()
        return tuple(getattr(self, name) for name in names), {"field_names": names}

    def fsdp_assign_gathered(
        self, gathered: Tuple[Optional[Tensor], ...], meta: Dict[str, Any]
    ) -> None:
        """Takes the arrays that were gathered."""
        names = meta["field_names"]
        if len(names) != len(gathered):
            raise RuntimeError(
                f"{type(self).__name__}.fsdp_assign_gathered got {len(gathered)} buffers "
                f"for {len(names)} fields"
            )
        for name, array in zip(names, gathered):
            setattr(self, name, array)


class ArrayStorage(QuantizedTensorStorage):
    """A quantized tensor of arrays and settings; a format says how they lie."""

    _rowwise_data: Any
    _rowwise_scale_inv: Any
    _columnwise_data: Any
    _columnwise_scale_inv: Any
    # Attributes and the arguments of the constructor that they come from.
    _ARRAYS: ClassVar[Dict[str, str]]
    _SETTINGS: ClassVar[Dict[str, str]]
    # The attributes of codes and of all arrays of a direction.
    _CODES: ClassVar[Dict[str, str]] = {"row": "_rowwise_data", "column": "_columnwise_data"}
    _SIDES: ClassVar[Dict[str, Tuple[str, ...]]] = {
        "row": ("_rowwise_data", "_rowwise_scale_inv"),
        "column": ("_columnwise_data", "_columnwise_scale_inv"),
    }

    @classmethod
    def _made(
        cls, arrays: Dict[str, Optional[Tensor]], settings: Dict[str, Any], quantizer: Any,
        args: Tuple[Any, ...], fake_dtype: Optional[torch.dtype], kwargs: Dict[str, Any],
    ) -> Any:  # fmt: skip
        made: Any
        if issubclass(cls, Tensor):
            if kwargs.get("device") is None:
                kwargs["device"] = next((a.device for a in arrays.values() if a is not None), None)
            made = super().__new__(cls, *args, fake_dtype=fake_dtype, **kwargs)  # type: ignore[call-arg]
        else:
            made = object.__new__(cls)
            made._dtype = torch.float32 if fake_dtype is None else fake_dtype
        for name, value in {**arrays, **settings}.items():
            setattr(made, name, value)
        made._quantizer = None if quantizer is None else quantizer.copy()
        return made

    # A format's own.

    @classmethod
    def stored(
        cls, side: str, parts: List[Tensor], shape: torch.Size, quantizer: Any
    ) -> Dict[str, Tensor]:
        """The arrays of a direction as they are stored, from those of the engine."""
        raise NotImplementedError

    @classmethod
    def _settings_of(cls, quantizer: Any) -> Dict[str, Any]:
        """The arguments of the constructor that say how a quantizer stores."""
        raise NotImplementedError

    def _parts(self, side: str) -> List[Tensor]:
        """The arrays of a direction as the engine has them."""
        raise NotImplementedError

    def _spec(self) -> str:
        """What decodes it, in recipe syntax."""
        raise NotImplementedError

    def _stored_shape(self) -> torch.Size:
        """The shape of the values, from that of the codes."""
        raise NotImplementedError

    def _codes_in(self, shape: torch.Size) -> Optional[Dict[str, Tensor]]:
        """The codes in another shape of the values, by attributes; None if scales forbid it."""
        raise NotImplementedError

    # What follows.

    def _has(self, side: str) -> bool:
        return getattr(self, self._CODES[side]) is not None

    def _some(self) -> Optional[Tensor]:
        """An array that is there."""
        codes = [getattr(self, name) for name in self._CODES.values()]
        return next((array for array in codes if array is not None), None)

    def _arrays_there(self) -> List[Tensor]:
        arrays = [getattr(self, name) for name in self._ARRAYS]
        return [array for array in arrays if array is not None]

    @property
    def quantized(self) -> nvfp4.QuantTensor:
        """The arrays as a tensor of this package."""
        sides = {side: self._parts(side) for side in self._CODES if self._has(side)}
        spec = self._spec() if self._quantizer is None else self._quantizer.spec()
        return nvfp4.QuantTensor.from_parts(spec, tuple(self.size()), **sides)  # type: ignore[arg-type]

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        name = type(self).__name__
        if self._some() is None:
            raise ValueError(f"{name}: attempted to dequantize a tensor with no data")
        shape = torch.Size(self.size())
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        known = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
        side = "row" if self._has("row") else "column"
        matrix = matrix_shape(shape)
        if side == "row" and (self.device.type == "meta" or torch.compiler.is_compiling()):
            block = block_of(self._parts(side))
            return dequantize_block(block, self._spec(), *matrix, known).reshape(shape).to(dtype)
        whole = nvfp4.QuantTensor.from_parts(self._spec(), matrix, **{side: self._parts(side)})  # type: ignore[arg-type]
        values = whole.dequantize(known, side=side)
        values = values if side == "row" else values.t()
        return values.reshape(shape).contiguous().to(dtype)

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """The values, in the type that was quantized unless another is asked for."""
        dtype = self._dtype if dtype is None else dtype
        if isinstance(self, Tensor) and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)
        return self._decoded(dtype)

    def size(self, dim: Optional[int] = None) -> Any:
        """The shape of the values, or one dimension of it."""
        if isinstance(self, Tensor):
            shape = torch._C.TensorBase.size(self)
        elif self._some() is None:
            raise RuntimeError(f"attempted to get the shape of {type(self).__name__} with no data")
        else:
            shape = self._stored_shape()
        return shape if dim is None else shape[dim]

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        array = self._some()
        if array is None:
            raise RuntimeError(f"{type(self).__name__} has no data!")
        return array.device

    def view(self, *shape: Any) -> Any:
        """The same codes in another shape, where scales allow it."""
        if isinstance(self, Tensor):
            return View.apply(self, shape)
        new = resolved(self.size(), shape)
        codes = self._codes_in(new)
        if codes is None:
            raise RuntimeError(
                f"{type(self).__name__} does not support reshaping inner dimension "
                f"(attempted to reshape dims={tuple(self.size())} to {tuple(new)})"
            )
        metadata = self.get_metadata()
        metadata.update({self._ARRAYS[name]: array for name, array in codes.items()})
        return type(self)(**metadata)

    def get_metadata(self) -> Dict[str, Any]:
        """The arguments of the constructor that make it again, of the same arrays."""
        named = {**self._ARRAYS, **self._SETTINGS}
        made = {argument: getattr(self, name) for name, argument in named.items()}
        return {**made, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def get_usages(self) -> Dict[str, bool]:
        return {"rowwise": self._has("row"), "columnwise": self._has("column")}

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        wanted = {"row": rowwise_usage, "column": columnwise_usage}
        if columnwise_usage and not self._has("column") and self._has("row"):
            self._make_column()
        for side, want in wanted.items():
            if want and any(getattr(self, name) is None for name in self._SIDES[side]):
                raise RuntimeError(
                    f"Requested {side}-wise usage, but {type(self).__name__} is missing "
                    f"{side}-scaled data"
                )
        for side, want in wanted.items():
            if want is False:
                self._drop(side)

    def _drop(self, side: str) -> None:
        for name in self._SIDES[side]:
            setattr(self, name, None)

    def _make_column(self) -> None:
        """Makes the column direction of the row direction, where a format allows it."""
        raise RuntimeError(
            f"Requested column-wise usage, but {type(self).__name__} is missing column-scaled data"
        )

    def prepare_for_saving(self) -> Tuple[List[Optional[Tensor]], "QuantizedTensorStorage"]:
        arrays = [getattr(self, name) for name in self._ARRAYS]
        for name in self._ARRAYS:
            setattr(self, name, None)
        return arrays, self

    def restore_from_saved(self, tensors: List[Optional[Tensor]]) -> List[Optional[Tensor]]:
        for name, tensor in zip(self._ARRAYS, tensors):
            setattr(self, name, tensor)
        return tensors[len(self._ARRAYS) :]

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The codes of the directions that are asked for."""
        asked = {"row": rowwise_data, "column": columnwise_data}
        codes = [getattr(self, self._CODES[side]) for side, want in asked.items() if want]
        if not codes:
            raise ValueError("No data to get, both rowwise_data and columnwise_data are False")
        return tuple(codes) if len(codes) == 2 else codes[0]

    def clear(self) -> None:
        """Frees the memory of the arrays."""
        for name in self._ARRAYS:
            if getattr(self, name) is not None:
                getattr(self, name).data = torch.empty(0)

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        if not isinstance(src, ArrayStorage) or src._ARRAYS is not self._ARRAYS:
            raise TypeError(f"copy_from_storage: expected the format of {type(self).__name__}")
        for name in self._SETTINGS:
            if getattr(self, name) != getattr(src, name):
                raise RuntimeError(f"copy_from_storage: mismatch of {name}")
        for name in self._ARRAYS:
            here, there = getattr(self, name), getattr(src, name)
            if here is not None and there is not None:
                write(here, there)

    def _take(self, arrays: Dict[str, Tensor], noop_flag: Optional[Tensor] = None) -> None:
        """Takes other arrays, in its own memory where they fit."""
        for name in self._ARRAYS:
            old, new = getattr(self, name), arrays.get(name)
            if old is None and new is None:
                continue
            if old is None or new is None or old.shape != new.shape or old.device != new.device:
                if noop_flag is None or not noop_flag.any():
                    setattr(self, name, new)
            else:
                kept = noop_flag is not None
                write(old, torch.where(noop_flag.reshape(()) == 0, new, old) if kept else new)  # type: ignore[union-attr]

    def _follow(self) -> None:
        """Makes what follows from arrays that were written."""

    def _take_settings(self, given: Dict[str, Any]) -> None:
        for name, argument in self._SETTINGS.items():
            setattr(self, name, given[argument])

    def fsdp_buffer_fields(self) -> Tuple[str, ...]:
        return tuple(n for side in self._SIDES if self._has(side) for n in self._SIDES[side])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        try:
            shown: Any = self._decoded(self._dtype)
        except Exception as error:  # noqa: BLE001  (what cannot be decoded is shown too)
            shown = f"<unmaterialized: {type(error).__name__}: {error}>"
        settings = "".join(f"{name[1:]}={getattr(self, name)}, " for name in self._SETTINGS)
        return f"{type(self).__name__}({settings}data={shown})"

    # How compilers see it.

    def __tensor_flatten__(self) -> Tuple[List[str], Dict[str, Any]]:
        there = [name for name in self._ARRAYS if getattr(self, name) is not None]
        plain = {
            argument: value
            for argument, value in self.get_metadata().items()
            if argument not in self._ARRAYS.values()
        }
        is_tensor = isinstance(self, Tensor)
        return there, {
            "cls": type(self),
            "is_tensor": is_tensor,
            "requires_grad": is_tensor and bool(self.requires_grad),  # type: ignore[attr-defined]
            "nontensor_kwargs": plain,
        }

    @staticmethod
    def __tensor_unflatten__(inner_tensors, ctx, outer_size, outer_stride):
        cls, kwargs = ctx["cls"], dict(ctx["nontensor_kwargs"])
        kwargs.update({arg: inner_tensors.get(name) for name, arg in cls._ARRAYS.items()})
        if not ctx["is_tensor"]:
            return cls(**kwargs)
        return cls(
            shape=tuple(outer_size),
            dtype=kwargs["fake_dtype"],
            requires_grad=ctx["requires_grad"],
            stride=None if outer_stride is None else tuple(outer_stride),
            **kwargs,
        )


def write(array: Tensor, values: Tensor) -> None:
    """Writes an array, and counts it, as torch does not below an operation in place: what was made
    of the array is no longer its own.
    """
    array.copy_(values)
    if not torch.compiler.is_compiling() and not array.is_inference():
        torch.autograd.graph.increment_version(array)


class _Dequantize(torch.autograd.Function):
    """Decodes; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, tensor, dtype):
        return tensor._decoded(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def prepare_for_saving(*tensors: Any) -> Tuple[List[Optional[Tensor]], List[Any]]:
    """Tensors for ``save_for_backward``, and the storages that they are taken out of."""
    saved: List[Optional[Tensor]] = []
    objects: List[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            saved.append(tensor)
            objects.append(None)
        else:
            arrays, storage = tensor.prepare_for_saving()
            saved.extend(arrays)
            objects.append(storage)
    return saved, objects


def restore_from_saved(
    tensors: List[Any], saved_tensors: Any, return_saved_tensors: bool = False
) -> Any:
    """Puts together what ``prepare_for_saving`` took apart."""
    left, made = list(saved_tensors), []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            made.append(left[0])
            left = left[1:]
        else:
            left = tensor.restore_from_saved(left)
            made.append(tensor)
    return (made, left) if return_saved_tensors else made


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """The same of a function's context, which then forgets the storages."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
    made = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return made

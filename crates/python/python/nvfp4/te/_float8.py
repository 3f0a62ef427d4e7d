"""FP8 with one scale, under TransformerEngine's names."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4

from ._fsdp import Gathered
from ._format import DType, QParams, fp8_code_of, spec_of
from ._quantizer import Quantizer, matrix_of, matrix_shape
from ._storage import ArrayStorage
from ._tensor import ArrayTensor
from ._values import ValueQuantizer
from ._weights import Weight
from .recipe import DelayedScaling, Float8CurrentScaling

_quantize_delayed = torch.ops.nvfp4.quantize_delayed


class Float8TensorStorage(ArrayStorage):
    """FP8 codes with one scale. Both directions have the same codes, so they are stored once:
    products transpose them. ``_transpose`` is there only if it was given.
    """

    _ARRAYS = {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    _SETTINGS = {"_fp8_dtype": "fp8_dtype"}
    _CODES = {"row": "_data", "column": "_transpose"}
    _SIDES = {"row": ("_data",), "column": ("_transpose",)}
    _data: Any
    _transpose: Any
    _scale_inv: Any
    _fp8_dtype: DType
    _transpose_invalid: bool

    def __new__(
        cls,
        *args,
        data: Optional[Tensor],
        fp8_scale_inv: Tensor,
        fp8_dtype: Any,
        fake_dtype: Optional[torch.dtype] = None,
        data_transpose: Optional[Tensor] = None,
        quantizer: Optional[Quantizer] = None,
        **kwargs,
    ):
        arrays = {"_data": data, "_transpose": data_transpose, "_scale_inv": fp8_scale_inv}
        settings = {
            "_fp8_dtype": DType.cast(fp8_dtype),
            "_transpose_invalid": data_transpose is None,
        }
        return cls._made(arrays, settings, quantizer, args, fake_dtype, kwargs)

    @classmethod
    def _settings_of(cls, quantizer: Any) -> Dict[str, Any]:
        return {"fp8_dtype": quantizer.dtype}

    @classmethod
    def stored(
        cls, side: str, parts: List[Tensor], shape: torch.Size, quantizer: Any
    ) -> Dict[str, Tensor]:
        codes, scale = parts[:2]
        return {"_data": codes.reshape(shape), "_scale_inv": scale.reshape(1)}

    @property
    def quantized(self) -> nvfp4.QuantTensor:
        sides = {side: self._parts(side) for side in ("row", "column")}
        return nvfp4.QuantTensor.from_parts(self._product_spec(), tuple(self.size()), **sides)  # type: ignore[arg-type]

    def _product_spec(self) -> str:
        """The format, without a scale that is from earlier steps."""
        if self._quantizer is None or isinstance(self._quantizer, Float8Quantizer):
            return self._spec()
        return self._quantizer.spec()

    def _has(self, side: str) -> bool:
        if side == "row":
            return self._data is not None
        return self._transpose is not None and not self._transpose_invalid

    def _parts(self, side: str) -> List[Tensor]:
        rows, cols = matrix_shape(self.size())
        scale = self._scale_inv.reshape(1, 1)
        codes = self._data if self._data is not None else self._transpose
        matrix = codes.reshape((rows, cols) if self._data is not None else (cols, rows))
        if (side == "row") != (self._data is not None):
            matrix = matrix.t()
        return [matrix.contiguous().view(torch.uint8), scale.to(matrix.device)]

    def _spec(self) -> str:
        return spec_of("fp8", fp8_code_of(self._fp8_dtype))

    def _stored_shape(self) -> torch.Size:
        if self._data is not None:
            return self._data.shape
        first, *rest = self._transpose.shape
        return torch.Size((*rest, first))

    def _codes_in(self, shape: torch.Size) -> Optional[Dict[str, Tensor]]:
        if self._data is not None:
            kept = self._transpose if shape == self.size() else None
            return {"_data": self._data.view(shape), "_transpose": kept}  # type: ignore[dict-item]
        if shape != self.size():
            raise NotImplementedError(
                f"{type(self).__name__} view with columnwise-only data is only supported when the "
                "requested shape preserves the columnwise layout"
            )
        return {"_transpose": self._transpose}

    def get_usages(self) -> Dict[str, bool]:
        there = self._data is not None
        return {"rowwise": there, "columnwise": there}

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        if (rowwise_usage or columnwise_usage) and self._data is None:
            raise RuntimeError("Cannot generate FP8 data, even from FP8 data transpose")
        self._transpose, self._transpose_invalid = None, True

    def restore_from_saved(self, tensors: List[Optional[Tensor]]) -> List[Optional[Tensor]]:
        left = super().restore_from_saved(tensors)
        self._transpose_invalid = self._transpose is None
        return left

    def _create_transpose(self) -> None:
        """Stores the transposed codes too."""
        if self._data is not None:
            self._transpose = self._data.movedim(-1, 0).contiguous()
            self._transpose_invalid = False

    def _follow(self) -> None:
        if self._transpose is not None:
            self._create_transpose()

    def clear(self) -> None:
        # The scale may be that of other tensors too.
        for array in (self._data, self._transpose):
            if array is not None:
                array.data = torch.empty(0)
        self._transpose_invalid = True

    def fsdp_buffer_fields(self) -> Tuple[str, ...]:
        return ("_data",) if self._data is not None or self._transpose is None else ("_transpose",)

    def fsdp_extract_buffers(self) -> Tuple[Tuple[Optional[Tensor], ...], Dict[str, Any]]:
        names = self.fsdp_buffer_fields()
        if names == ("_data",):
            return (self._data,), {"field_names": names, "transport_layout": "native"}
        # Workers gather rows, which are columns of the transposed codes.
        rows = self._transpose.movedim(0, -1).contiguous()
        return (rows,), {"field_names": names, "transport_layout": "columnwise_m_major"}

    def fsdp_assign_gathered(
        self, gathered: Tuple[Optional[Tensor], ...], meta: Dict[str, Any]
    ) -> None:
        if meta.get("transport_layout") == "columnwise_m_major":
            (rows,) = gathered
            assert rows is not None, "it was gathered"
            gathered = (rows.movedim(-1, 0).contiguous(),)
            self._data, self._transpose_invalid = None, False
        super().fsdp_assign_gathered(gathered, meta)


class Float8Tensor(Float8TensorStorage, Gathered, Weight, ArrayTensor):  # type: ignore[misc, override]
    """A tensor in FP8 with one scale."""

    @classmethod
    def make_like(  # type: ignore[override]
        cls,
        tensor: Any,
        *,
        shape: Optional[Iterable[int]] = None,
        dtype: Optional[torch.dtype] = None,
        requires_grad: bool = False,
        data: Optional[Tensor] = None,
        data_transpose: Optional[Tensor] = None,
    ) -> Any:
        """A tensor of the same arrays, or of other codes with the same scale."""
        shape = data.shape if shape is None and data is not None else shape
        made = super().make_like(tensor, shape=shape, dtype=dtype, requires_grad=requires_grad)
        if data is not None:
            made._data = data
            made._transpose, made._transpose_invalid = None, True
        if data_transpose is not None:
            made._transpose, made._transpose_invalid = data_transpose, False
        return made

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        if self._data is None or self._data.is_contiguous(memory_format=memory_format):
            return self
        return type(self).make_like(self, data=self._data.contiguous(memory_format=memory_format))

    def _cut(self, function, *args, **kwargs):
        if self._data is not None:
            made = function(self._data, *args, **kwargs)
            wrap = lambda data: Float8Tensor.make_like(self, data=data)  # noqa: E731
        elif self._has("column"):
            # Transposed codes are cut where the codes would be.
            logical = self._transpose.movedim(0, -1)
            if function is torch.ops.aten.as_strided.default:
                function, args = torch.ops.aten.slice.Tensor, self._rows_of(*args)
                if not args:
                    return NotImplemented
            made = function(logical, *args, **kwargs)

            def wrap(data):
                turned = data.movedim(-1, 0) if data.dim() else data
                return Float8Tensor.make_like(self, shape=data.shape, data_transpose=turned)
        else:
            return NotImplemented
        return [wrap(data) for data in made] if isinstance(made, (list, tuple)) else wrap(made)

    def _rows_of(self, size, stride, storage_offset=None) -> Tuple[Any, ...]:
        """The arguments of ``slice`` if strides name whole rows of a matrix; nothing if not."""
        offset = self.storage_offset() if storage_offset is None else storage_offset
        whole = self.dim() == len(size) == 2 and size[1] == self.shape[1] and self.shape[1] > 0
        if not whole or tuple(stride) != tuple(self.stride()) or offset % self.shape[1]:
            return ()
        start = offset // self.shape[1]
        return (0, start, start + size[0]) if start + size[0] <= self.shape[0] else ()

    def _zeros(self, size, dtype, device, pin_memory) -> Any:
        if self._data is not None or not self._has("column"):
            return super()._zeros(size, dtype, device, pin_memory)
        device = self.device if device is None else device
        given = {"dtype": torch.uint8, "device": device, "pin_memory": bool(pin_memory)}
        turned = torch.zeros(size[-1], *size[:-1], **given)
        scale = self._scale_inv.detach().clone().to(device)
        return type(self)(
            shape=size, dtype=dtype or self.dtype, data=None, data_transpose=turned,
            fp8_scale_inv=scale, fp8_dtype=self._fp8_dtype, quantizer=self._quantizer,
        )  # fmt: skip

    def _reset_caches(self) -> None:
        """Notes that the transposed codes are no longer those of the tensor."""
        self._transpose_invalid = self._data is not None or self._transpose is None

    def remove_caches(self) -> None:
        """Drops the transposed codes."""
        self._transpose, self._transpose_invalid = None, True

    def _read(self) -> Tuple[str, Tuple[str, ...]]:
        return self._product_spec(), ("row", "column") if self._data is not None else ()


class _Float8(Quantizer):
    """What both quantizers of FP8 with one scale have."""

    dtype: DType
    _CLASSES = (Float8TensorStorage, Float8Tensor)

    def get_columnwise_shape(self, rowwise_data_shape: Iterable[int]) -> List[int]:
        """The shape of transposed codes."""
        sizes = list(rowwise_data_shape)
        return sizes[-1:] + sizes[:-1]

    def inner_tensor_specs(
        self, shape: Tuple[int, ...]
    ) -> Dict[str, Tuple[Tuple[int, ...], torch.dtype]]:
        return {"_data": (tuple(shape), torch.uint8), "_scale_inv": ((1,), torch.float32)}

    def _scale_inv_of(self, data: Tensor) -> Tensor:
        """The scale of codes that come from elsewhere."""
        raise NotImplementedError

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """A tensor of codes."""
        given: Dict[str, Any] = {
            "data": data, "fp8_scale_inv": self._scale_inv_of(data), "fp8_dtype": self.dtype,
            "fake_dtype": fake_dtype, "quantizer": self,
        }  # fmt: skip
        if internal:
            return Float8TensorStorage(**given)
        return Float8Tensor(
            shape=data.shape, dtype=fake_dtype, requires_grad=requires_grad, **given
        )

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


class Float8Quantizer(_Float8):
    """FP8 with a scale that is given. It notes the amax of what it quantizes."""

    scale: Tensor
    amax: Tensor

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_code_of(fp8_dtype)  # a wrong type fails here
        self.scale, self.amax, self.dtype = scale, amax, DType.cast(fp8_dtype)

    def spec(self) -> str:
        return spec_of("fp8-delayed", fp8_code_of(self.dtype))

    def arrays(self, tensor: Tensor, noop_flag: Optional[Tensor] = None) -> Dict[str, Tensor]:
        scale = self.scale.detach().reshape(1).to(tensor.device)
        *parts, amax = _quantize_delayed(
            matrix_of(tensor), self.spec(), "row", 0, None, scale, None
        )
        seen = torch.maximum(self.amax, amax.reshape(self.amax.shape).to(self.amax.device))
        if noop_flag is not None:
            seen = torch.where(noop_flag.reshape(()).to(seen.device) == 0, seen, self.amax)
        self.amax.copy_(seen)
        return self.stored(parts, [], tensor.shape)

    def calibrate(self, tensor: Tensor) -> None:
        self.amax.copy_(tensor.detach().abs().amax().reshape(self.amax.shape))

    def _scale_inv_of(self, data: Tensor) -> Tensor:
        return 1 / self.scale

    def _get_compatible_recipe(self) -> Any:
        return DelayedScaling


class Float8CurrentScalingQuantizer(ValueQuantizer, _Float8):
    """FP8 with one scale, from the tensor itself. It goes where the tensor is, whatever ``device``
    says.
    """

    with_amax_reduction: bool
    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Optional[Tensor] = None,
        amax: Optional[Tensor] = None,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn(
                "Float8CurrentScalingQuantizer ignores use_existing_amax, scale and amax: it takes "
                "the tensor's own",
                DeprecationWarning,
                stacklevel=2,
            )
        fp8_code_of(fp8_dtype)  # a wrong type fails here
        self.dtype = DType.cast(fp8_dtype)
        self.with_amax_reduction, self.amax_reduction_group = (
            with_amax_reduction,
            amax_reduction_group,
        )
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def spec(self) -> str:
        words = QParams(self.force_pow_2_scales, self.amax_epsilon).words
        return spec_of("fp8", fp8_code_of(self.dtype), *words)

    @property
    def directions(self) -> str:
        return "row"

    def _scale_inv_of(self, data: Tensor) -> Tensor:
        return torch.empty(1, dtype=torch.float32, device=data.device)

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        return Float8CurrentScaling

"""Two formats at once, one for each direction, under TransformerEngine's names."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4

from ._fsdp import GatheredSides
from ._identity import IdentityTensorStorage
from ._nvfp4_tensor import NVFP4Quantizer
from ._quantizer import Quantizer
from ._roles import QuantizerRequest
from ._storage import QuantizedTensorStorage
from ._tensor import QuantizedTensor
from ._views import View, resolved
from ._weights import Weight
from .recipe import CustomRecipe

_SOURCES = {"original": "", "rowwise_dequantized": " from row"}


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """A storage for the row direction and another one for the column direction; either may be
    missing.
    """

    _rowwise_storage: Any
    _columnwise_storage: Any

    def __new__(
        cls,
        *args,
        rowwise_storage: Any,
        columnwise_storage: Any,
        quantizer: Any,
        fake_dtype: Optional[torch.dtype] = None,
        **kwargs,
    ):
        if not hasattr(quantizer, "rowwise_quantizer") or not hasattr(
            quantizer, "columnwise_quantizer"
        ):
            raise TypeError(
                "HybridQuantizedTensorStorage requires a parent HybridQuantizer with "
                "rowwise_quantizer and columnwise_quantizer attributes; "
                f"got {type(quantizer).__name__}."
            )
        made: Any
        if issubclass(cls, Tensor):
            sides = (rowwise_storage, columnwise_storage)
            if kwargs.get("device") is None:
                kwargs["device"] = next((side.device for side in sides if side is not None), None)
            made = super().__new__(cls, *args, fake_dtype=fake_dtype, **kwargs)  # type: ignore[call-arg]
        else:
            made = object.__new__(cls)
            made._dtype = torch.float32 if fake_dtype is None else fake_dtype
        made._rowwise_storage, made._columnwise_storage = rowwise_storage, columnwise_storage
        made._quantizer = quantizer.copy()
        return made

    @property
    def rowwise_sub_storage(self) -> Any:
        """What is stored for the row direction."""
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> Any:
        """What is stored for the column direction."""
        return self._columnwise_storage

    def _sides(self) -> List[Any]:
        return [
            side for side in (self._rowwise_storage, self._columnwise_storage) if side is not None
        ]

    def _first(self) -> Any:
        sides = self._sides()
        if not sides:
            raise RuntimeError(f"{type(self).__name__} has no data")
        return sides[0]

    def _each(self, change: Callable[[Any], Any]) -> Dict[str, Any]:
        """The arguments of the constructor with something done to each direction."""
        sides = {
            "rowwise_storage": self._rowwise_storage,
            "columnwise_storage": self._columnwise_storage,
        }
        made = {name: None if side is None else change(side) for name, side in sides.items()}
        return {**made, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def get_metadata(self) -> Dict[str, Any]:
        return self._each(lambda side: side)

    def get_usages(self) -> Dict[str, bool]:
        return {
            "rowwise": self._rowwise_storage is not None,
            "columnwise": self._columnwise_storage is not None,
        }

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        asked = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        for side, usage in asked.items():
            if usage and getattr(self, f"_{side}_storage") is None:
                raise RuntimeError(
                    f"Requested {side} usage, but HybridQuantizedTensorStorage has no {side} "
                    "sub-storage"
                )
        for side, usage in asked.items():
            if usage is False:
                setattr(self, f"_{side}_storage", None)

    def prepare_for_saving(self) -> Tuple[List[Optional[Tensor]], QuantizedTensorStorage]:
        return [array for side in self._sides() for array in side.prepare_for_saving()[0]], self

    def restore_from_saved(self, tensors: List[Optional[Tensor]]) -> List[Optional[Tensor]]:
        for side in self._sides():
            tensors = side.restore_from_saved(tensors)
        return tensors

    def clear(self) -> None:
        for side in self._sides():
            side.clear()

    def get_data_tensors(self) -> Tuple[Any, ...]:
        """The codes of both directions."""
        made: List[Any] = []
        for side in self._sides():
            codes = side.get_data_tensors()
            made.extend(codes if isinstance(codes, tuple) else (codes,))
        return tuple(made)

    def _arrays_there(self) -> List[Tensor]:
        return [array for side in self._sides() for array in side._arrays_there()]

    @property
    def quantized(self) -> nvfp4.QuantTensor:
        """The arrays as a tensor of this package."""
        sides = {"row": self._rowwise_storage, "column": self._columnwise_storage}
        parts = {name: side._parts(name) for name, side in sides.items() if side is not None}
        return nvfp4.QuantTensor.from_parts(self._quantizer.spec(), tuple(self.size()), **parts)

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """The values of the row direction, or of the column direction if there is no other."""
        if not self._sides():
            raise RuntimeError("HybridQuantizedTensorStorage has no data to dequantize")
        return self._first().dequantize(dtype=self._dtype if dtype is None else dtype)

    def size(self, dim: Optional[int] = None) -> Any:
        """The shape of the values, or one dimension of it."""
        return self._first().size() if dim is None else self._first().size(dim)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self._first().device

    def view(self, *shape: Any) -> Any:
        """The same in another shape."""
        if isinstance(self, Tensor):
            return View.apply(self, shape)
        new = resolved(self.size(), shape)
        same = new == self.size()
        return type(self)(**self._each(lambda side: side if same else side.view(new)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        row, column = (
            None if side is None else type(side).__name__
            for side in (self._rowwise_storage, self._columnwise_storage)
        )
        return f"{type(self).__name__}(rowwise={row}, columnwise={column}, dtype={self._dtype})"


class HybridQuantizedTensor(HybridQuantizedTensorStorage, GatheredSides, Weight, QuantizedTensor):  # type: ignore[misc, override]
    """A tensor in two formats, one for each direction."""

    def __new__(
        cls, *args, rowwise_storage: Any, columnwise_storage: Any, quantizer: Any, **kwargs
    ):
        return super().__new__(
            cls, *args, rowwise_storage=rowwise_storage, columnwise_storage=columnwise_storage,
            quantizer=quantizer, **kwargs,
        )  # fmt: skip

    def _made(self, sides: Dict[str, Any], shape: Any = None, **kwargs) -> "HybridQuantizedTensor":
        shape = self.shape if shape is None else shape
        return type(self)(shape=shape, dtype=self.dtype, **sides, **kwargs)

    def detach(self) -> "HybridQuantizedTensor":
        # With sides of its own: a copy may give its arrays away.
        for role in ("rowwise", "columnwise"):
            side = getattr(self, f"_{role}_storage")
            if side is not None and not hasattr(side, "make_like"):
                raise NotImplementedError(
                    f"HybridQuantizedTensor.detach() does not support storage-only {role} "
                    f"sub-storage {type(side).__name__}"
                )
        return self._made(self._each(lambda side: type(side).make_like(side)))

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        def one(side):
            if not isinstance(side, Tensor):
                raise ValueError(
                    "HybridQuantizedTensor.contiguous does not support storage-only sub-storage "
                    f"{type(side).__name__}"
                )
            try:
                return side.contiguous(memory_format=memory_format)
            except (NotImplementedError, ValueError) as error:
                raise ValueError(
                    f"HybridQuantizedTensor.contiguous could not make the sub-storage "
                    f"{type(side).__name__} contiguous with memory_format={memory_format}."
                ) from error

        sides = self._each(one)
        if all(sides[name] is side for name, side in self.get_metadata().items()):
            return self
        return self._made(sides, requires_grad=self.requires_grad)

    def _shaped(self, shape: torch.Size) -> Any:
        if shape == self.shape:
            return type(self).make_like(self)
        return self._made(self._each(lambda side: side.view(shape)), shape)

    def _cut(self, function, *args, **kwargs) -> Any:
        try:
            sides = self._each(lambda side: function(side, *args, **kwargs))
        except NotImplementedError:  # a direction that is not decoded
            return NotImplemented
        parts = [sides[name] for name in ("rowwise_storage", "columnwise_storage")]
        if any(isinstance(part, (list, tuple)) for part in parts):
            return self._pieces(parts, *args, **kwargs)
        if any(part is not None and not isinstance(part, QuantizedTensor) for part in parts):
            return NotImplemented
        return self._made(sides, next(part.shape for part in parts if part is not None))

    def _pieces(self, parts, size, dim=0) -> Any:
        if dim != 0:
            return NotImplemented
        for part in parts:
            for piece in part or ():
                if not isinstance(piece, QuantizedTensor):
                    raise NotImplementedError(
                        "HybridQuantizedTensor split produced a high-precision tensor for a "
                        f"sub-storage with local shape {tuple(piece.shape)}. Hybrid FSDP2 does not "
                        "support high-precision fallback children. MXFP8 FSDP shards must have a "
                        "first dimension divisible by 32."
                    )
        row, column = (
            [None] * len(parts[0] or parts[1]) if part is None else part for part in parts
        )
        given = {"quantizer": self._quantizer, "fake_dtype": self._dtype}
        return [
            self._made(
                {"rowwise_storage": r, "columnwise_storage": c, **given},
                (c if r is None else r).shape,
            )
            for r, c in zip(row, column)
        ]

    def _copied(self, source: Any) -> bool:
        """Takes the arrays of another one."""
        if not isinstance(source, HybridQuantizedTensor):
            return False
        if self.get_usages() != source.get_usages():
            raise NotImplementedError(
                "HybridQuantizedTensor.copy_ requires matching rowwise/columnwise usages, but "
                f"source has {source.get_usages()} and destination has {self.get_usages()}. "
                "Copy from a high-precision tensor instead."
            )
        for here, there in zip(self._sides(), source._sides()):
            torch.ops.aten.copy_.default(here, there)
        return True

    def _adopt(self, tensor: Any) -> None:
        self._rowwise_storage = tensor._rowwise_storage
        self._columnwise_storage = tensor._columnwise_storage

    def _zeros(self, size, dtype, device, pin_memory) -> Any:
        if not self._sides():
            raise RuntimeError(
                "HybridQuantizedTensor.new_zeros requires at least one present sub-storage"
            )
        dtype = self.dtype if dtype is None else dtype
        quantizer, sides = self._quantizer.copy(), {}  # type: ignore[var-annotated]
        for role in ("rowwise", "columnwise"):
            side = getattr(self, f"_{role}_storage")
            sides[f"{role}_storage"] = None
            if side is None:
                continue
            known = (torch.float32, torch.float16, torch.bfloat16)
            if dtype not in known and not isinstance(side, IdentityTensorStorage):
                raise TypeError(
                    "HybridQuantizedTensor.new_zeros only supports float32, float16, or bfloat16 "
                    f"with a {role} {type(side).__name__}; got {dtype}."
                )
            own = side._get_quantizer().copy()
            setattr(quantizer, f"{role}_quantizer", own)
            made = own.make_empty(
                size, dtype=dtype, device=device or self.device, pin_memory=bool(pin_memory)
            )
            for array in made._arrays_there():
                array.zero_()
            sides[f"{role}_storage"] = made
        quantizer.set_usage(**self.get_usages())
        return type(self)(shape=size, dtype=dtype, quantizer=quantizer, **sides)

    def _read(self) -> Tuple[str, Tuple[str, ...]]:
        row, column = self._rowwise_storage, self._columnwise_storage
        plain = [isinstance(side, IdentityTensorStorage) for side in (row, column)]
        spec = self._quantizer.spec()
        if row is None or plain[0] or (plain[1] and not spec.endswith(" from row")):
            return spec, ()
        if column is None or plain[1]:  # gradients are those of the decoded rows
            return spec.partition(" / ")[0], ("row",)
        return spec, ("row", "column")

    def _parts(self, side: str) -> List[Tensor]:
        return (self._rowwise_storage if side == "row" else self._columnwise_storage)._parts(side)


class HybridQuantizer(Quantizer):
    """One quantizer for the row direction and another one for the column direction, which is made
    from the tensor or from what the row direction decodes to.
    """

    rowwise_quantizer: Any
    columnwise_quantizer: Any
    columnwise_source: str
    _CLASSES = (HybridQuantizedTensorStorage, HybridQuantizedTensor)

    def __init__(
        self,
        *,
        rowwise_quantizer: Any,
        columnwise_quantizer: Any,
        columnwise_source: str = "original",
    ):
        super().__init__(rowwise=True, columnwise=True)
        for name, given in (
            ("rowwise_quantizer", rowwise_quantizer),
            ("columnwise_quantizer", columnwise_quantizer),
        ):
            if isinstance(given, QuantizerRequest):
                raise TypeError(
                    f"{name}: HybridQuantizer does not support nested QuantizerRequest objects "
                    f"yet; got {type(given).__name__}. A factory returns a "
                    "DelayedScalingRequest for a whole tensor"
                )
            if not isinstance(given, Quantizer):
                raise TypeError(
                    f"{name}: HybridQuantizer requires concrete Quantizer instances, got {given!r}"
                )
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "rowwise_quantizer and columnwise_quantizer are the same object, but "
                "HybridQuantizer requires distinct rowwise and columnwise quantizer instances: "
                "pass a copy() of it"
            )
        if columnwise_source not in _SOURCES:
            raise ValueError(
                "HybridQuantizer columnwise_source must be one of "
                f"{', '.join(map(repr, _SOURCES))}, got {columnwise_source!r}"
            )
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def spec(self) -> str:
        row, column = self.rowwise_quantizer.row_spec(), self.columnwise_quantizer.spec()
        if row == column and row.startswith("high-precision"):
            return row
        return f"{row} / {column}{_SOURCES[self.columnwise_source]}"

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", columnwise_source={self.columnwise_source!r})"

    def copy(self) -> "HybridQuantizer":
        new = super().copy()
        new.rowwise_quantizer = self.rowwise_quantizer.copy()
        new.columnwise_quantizer = self.columnwise_quantizer.copy()
        return new

    def _both(self) -> Tuple[Any, Any]:
        return self.rowwise_quantizer, self.columnwise_quantizer

    @property
    def with_amax_reduction(self) -> bool:
        """Whether workers agree on the amax of a direction."""
        return any(getattr(each, "with_amax_reduction", False) for each in self._both())

    @with_amax_reduction.setter
    def with_amax_reduction(self, value: bool) -> None:
        for each in self._both():
            if hasattr(each, "with_amax_reduction"):
                each.with_amax_reduction = value

    @property
    def amax_reduction_group(self) -> Any:
        """The workers that agree on amaxes."""
        groups = [getattr(each, "amax_reduction_group", None) for each in self._both()]
        there = [group for group in groups if group is not None]
        if len(there) == 2 and there[0] is not there[1]:
            raise RuntimeError(
                "HybridQuantizer sub-quantizers have inconsistent amax_reduction_group values."
            )
        return there[0] if there else None

    @amax_reduction_group.setter
    def amax_reduction_group(self, value: Any) -> None:
        for each in self._both():
            if hasattr(each, "amax_reduction_group"):
                each.amax_reduction_group = value

    def _source(self, tensor: Tensor, row: Any) -> Tensor:
        """What the column direction is made from."""
        if self.columnwise_source == "original":
            return tensor
        return self._columnwise_src_from_rowwise(tensor, row)

    def _columnwise_src_from_rowwise(self, tensor: Tensor, rowwise_result: Any) -> Tensor:
        """What the row direction decodes to; it is made if there is none."""
        if rowwise_result is None:
            rowwise_result = self.rowwise_quantizer.quantize(tensor)
        return rowwise_result.dequantize(dtype=tensor.dtype)

    def _wrap(
        self, row: Any, column: Any, shape: Iterable[int], dtype: torch.dtype, **kwargs
    ) -> Any:
        sides = {"rowwise_storage": row, "columnwise_storage": column, "quantizer": self}
        if self.internal:
            return HybridQuantizedTensorStorage(**sides, fake_dtype=dtype)
        return HybridQuantizedTensor(shape=tuple(shape), dtype=dtype, **sides, **kwargs)

    def quantize_impl(self, tensor: Tensor) -> Any:
        row = column = None
        if self.rowwise_usage:
            row = self.rowwise_quantizer.quantize(tensor)
        if self.columnwise_usage:
            column = self.columnwise_quantizer.quantize(self._source(tensor, row))
        return self._wrap(row, column, tensor.shape, tensor.dtype)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Optional[Tensor] = None) -> Any:
        if not isinstance(dst, HybridQuantizedTensorStorage):
            raise ValueError(
                "HybridQuantizer can only update HybridQuantizedTensorStorage, got "
                f"{type(dst).__name__}"
            )
        row = dst._rowwise_storage if self.rowwise_usage else None
        column = dst._columnwise_storage if self.columnwise_usage else None
        if row is not None:
            self.rowwise_quantizer.update_quantized(src, row, noop_flag=noop_flag)
        if column is not None:
            source = self._source(src, row)
            self.columnwise_quantizer.update_quantized(source, column, noop_flag=noop_flag)
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
        shape, given = tuple(shape), {"dtype": dtype, "device": device, "pin_memory": pin_memory}
        row = self.rowwise_quantizer.make_empty(shape, **given) if self.rowwise_usage else None
        column = (
            self.columnwise_quantizer.make_empty(shape, **given) if self.columnwise_usage else None
        )
        return self._wrap(row, column, shape, dtype, requires_grad=requires_grad)

    def supports_only_rowwise_all_gather(self) -> bool:
        # What workers gather is decoded, which columns of NVFP4 alone are not.
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or isinstance(
            self.columnwise_quantizer, NVFP4Quantizer
        )

    def is_requantization_safe(self) -> bool:
        needs_row = self.rowwise_usage or (
            self.columnwise_usage and self.columnwise_source == "rowwise_dequantized"
        )
        if needs_row and not self.rowwise_quantizer.is_requantization_safe():
            return False
        return not self.columnwise_usage or self.columnwise_quantizer.is_requantization_safe()

    def _get_compatible_recipe(self) -> Any:
        return CustomRecipe

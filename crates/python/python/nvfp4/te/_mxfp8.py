"""MXFP8, under TransformerEngine's names."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

from ._fsdp import Gathered
from ._format import DType, fp8_code_of, spec_of
from ._order import padded, swizzled, unswizzled
from ._quantizer import Quantizer, matrix_shape, up, whole_blocks
from ._storage import ArrayStorage
from ._tensor import ArrayTensor
from ._values import ValueQuantizer
from ._weights import Weight
from .recipe import MXFP8BlockScaling

BLOCK = 32
# To what scales are padded in each direction.
_TILE = {"row": (128, 4), "column": (4, 128)}


class MXFP8TensorStorage(ArrayStorage):
    """FP8 codes with scales of 32 values, which are exponents. Codes of both directions have the
    shape of the values. Scales of rows are [rows, columns/32], those of columns [rows/32, columns],
    padded with zeros to 128 and to 4.
    """

    _ARRAYS = {
        "_rowwise_data": "rowwise_data",
        "_columnwise_data": "columnwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_scale_inv": "columnwise_scale_inv",
    }
    _SETTINGS = {
        "_fp8_dtype": "fp8_dtype",
        "_with_gemm_swizzled_scales": "with_gemm_swizzled_scales",
    }

    _fp8_dtype: DType
    _with_gemm_swizzled_scales: bool

    def __new__(
        cls,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        fp8_dtype: Any,
        quantizer: Optional[Quantizer],
        with_gemm_swizzled_scales: bool,
        *args,
        fake_dtype: Optional[torch.dtype] = None,
        **kwargs,
    ):
        arrays = {
            "_rowwise_data": rowwise_data,
            "_rowwise_scale_inv": rowwise_scale_inv,
            "_columnwise_data": columnwise_data,
            "_columnwise_scale_inv": columnwise_scale_inv,
        }
        settings = {
            "_fp8_dtype": DType.cast(fp8_dtype),
            "_with_gemm_swizzled_scales": with_gemm_swizzled_scales,
        }
        return cls._made(arrays, settings, quantizer, args, fake_dtype, kwargs)

    @classmethod
    def _settings_of(cls, quantizer: Any) -> Dict[str, Any]:
        return {
            "fp8_dtype": quantizer.dtype,
            "with_gemm_swizzled_scales": quantizer.optimize_for_gemm,
        }

    @classmethod
    def stored(
        cls, side: str, parts: List[Tensor], shape: torch.Size, quantizer: Any
    ) -> Dict[str, Tensor]:
        codes, scales = parts
        scales = padded(scales, *_TILE[side])
        if quantizer.optimize_for_gemm:
            scales = (
                swizzled(scales) if side == "row" else swizzled(scales.t()).reshape(scales.shape)
            )
        return {f"_{side}wise_data": codes.reshape(shape), f"_{side}wise_scale_inv": scales}

    def _parts(self, side: str) -> List[Tensor]:
        data, scales = (getattr(self, name) for name in self._SIDES[side])
        rows, cols = matrix_shape(data.shape)
        if self._with_gemm_swizzled_scales:
            turned = scales.reshape(scales.shape[::-1])
            scales = unswizzled(scales) if side == "row" else unswizzled(turned).t()
        height, width = (rows, -(-cols // BLOCK)) if side == "row" else (-(-rows // BLOCK), cols)
        return [data.reshape(rows, cols).contiguous(), scales[:height, :width].contiguous()]

    def _spec(self) -> str:
        return spec_of("mxfp8", fp8_code_of(self._fp8_dtype))

    def _stored_shape(self) -> torch.Size:
        return self._some().shape  # type: ignore[union-attr]

    def _codes_in(self, shape: torch.Size) -> Optional[Dict[str, Tensor]]:
        if not shape or shape[-1] != self.size()[-1]:
            return None
        there = {name: getattr(self, name) for name in self._CODES.values()}
        return {name: data.view(shape) for name, data in there.items() if data is not None}

    def _build_default_quantizer(self) -> "MXFP8Quantizer":
        return MXFP8Quantizer(self._fp8_dtype)

    def fsdp_extract_buffers(self) -> Tuple[Tuple[Optional[Tensor], ...], Dict[str, Any]]:
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError(
                "FSDP2 is only supported for MXFP8Tensors with compact scales"
            )
        rows, _ = matrix_shape(self.size())
        heights = {"_rowwise_scale_inv": rows, "_columnwise_scale_inv": -(-rows // BLOCK)}
        names = self.fsdp_buffer_fields()
        arrays = (getattr(self, name) for name in names)
        # A shard's own padding would lie between those of two workers.
        cut = (a[: heights[n]] if n in heights else a for n, a in zip(names, arrays))
        return tuple(cut), {"field_names": names}

    def fsdp_assign_gathered(
        self, gathered: Tuple[Optional[Tensor], ...], meta: Dict[str, Any]
    ) -> None:
        super().fsdp_assign_gathered(gathered, meta)
        for side, (rows, _) in _TILE.items():
            name = f"_{side}wise_scale_inv"
            if name in meta["field_names"] and getattr(self, name) is not None:
                setattr(self, name, padded(getattr(self, name), rows, 1))


class MXFP8Tensor(MXFP8TensorStorage, Gathered, Weight, ArrayTensor):  # type: ignore[misc, override]
    """A tensor in MXFP8."""

    def __new__(
        cls,
        *args,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        fp8_dtype: Any,
        quantizer: Optional[Quantizer],
        with_gemm_swizzled_scales: bool,
        **kwargs,
    ):
        return super().__new__(
            cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype,
            quantizer, with_gemm_swizzled_scales, *args, **kwargs,
        )  # fmt: skip

    def _cut(self, function, *args, **kwargs) -> Any:
        if function is not torch.ops.aten.split.Tensor or self._with_gemm_swizzled_scales:
            return NotImplemented
        size, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if dim != 0 or self.dim() != 2 or self.shape[0] % size or size % BLOCK:
            return NotImplemented
        pieces = [{} for _ in range(self.shape[0] // size)]  # type: ignore[var-annotated]
        for side in self._CODES:
            if self._has(side):
                codes, scales = self._parts(side)
                heights = size, size if side == "row" else size // BLOCK
                for piece, *parts in zip(pieces, codes.split(heights[0]), scales.split(heights[1])):
                    stored = (parts[0], padded(parts[1], *_TILE[side]))
                    piece.update(zip((self._ARRAYS[name] for name in self._SIDES[side]), stored))
        empty = dict.fromkeys(self._ARRAYS.values())
        given = {**self.get_metadata(), **empty}
        shape = (size, self.shape[1])
        return [type(self)(shape=shape, dtype=self.dtype, **{**given, **piece}) for piece in pieces]


class MXFP8Quantizer(ValueQuantizer):
    """MXFP8, with a scale for 32 values or for squares of 32×32."""

    dtype: DType
    with_2d_quantization: bool
    _CLASSES = (MXFP8TensorStorage, MXFP8Tensor)

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_code_of(fp8_dtype)  # a wrong type fails here
        self.dtype, self.with_2d_quantization = DType.cast(fp8_dtype), with_2d_quantization

    def spec(self) -> str:
        return spec_of(
            "mxfp8", fp8_code_of(self.dtype), "32x32" if self.with_2d_quantization else ""
        )

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> Tuple[int, int]:
        """The shape of the scales of a direction."""
        rows, cols = matrix_shape(shape)
        if columnwise:
            return up(-(-rows // BLOCK), 4), up(cols, 128)
        return up(rows, 128), up(-(-cols // BLOCK), 4)

    def get_columnwise_shape(self, rowwise_data_shape: Tuple[int, ...]) -> Tuple[int, ...]:
        """The shape of the codes of the column direction: that of the values."""
        return rowwise_data_shape

    def inner_tensor_specs(
        self, shape: Tuple[int, ...]
    ) -> Dict[str, Tuple[Tuple[int, ...], torch.dtype]]:
        made = {}
        for side, used in (("row", self.rowwise_usage), ("column", self.columnwise_usage)):
            if used:
                made[f"_{side}wise_data"] = tuple(shape), torch.uint8
                scales = self.get_scale_shape(shape, side == "column")
                made[f"_{side}wise_scale_inv"] = scales, torch.uint8
        return made

    def create_tensor_from_data(
        self,
        data: Tensor,
        scale_inv: Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: Any = DType.kFloat8E4M3,
    ) -> MXFP8Tensor:
        """A tensor of codes and scales of its rows."""
        return MXFP8Tensor(
            shape=data.shape, dtype=fake_dtype, rowwise_data=data, rowwise_scale_inv=scale_inv,
            columnwise_data=None, columnwise_scale_inv=None, fp8_dtype=fp8_dtype, quantizer=self,
            with_gemm_swizzled_scales=False,
        )  # fmt: skip

    def is_quantizable(self, inp: Tensor) -> bool:
        return whole_blocks(inp, BLOCK)

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        return MXFP8BlockScaling

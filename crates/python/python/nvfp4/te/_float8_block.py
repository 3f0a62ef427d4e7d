"""FP8 with scales of 128 values or of squares, under TransformerEngine's names."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

from ._fsdp import Gathered
from ._format import DType, QParams, fp8_code_of, spec_of
from ._order import padded
from ._quantizer import matrix_shape, up, whole_blocks
from ._storage import ArrayStorage
from ._tensor import ArrayTensor
from ._values import ValueQuantizer
from ._weights import Weight
from .recipe import Float8BlockScaling

BLOCK = 128


class Float8BlockwiseQTensorStorage(ArrayStorage):
    """FP8 codes with scales of 128 values or of squares of 128×128. The codes of the column
    direction are transposed. Scales of 128 values lie [blocks, rows], those of squares [blocks of
    rows, blocks of columns], padded with zeros to a multiple of 4.
    """

    _ARRAYS = {
        "_rowwise_data": "rowwise_data",
        "_columnwise_data": "columnwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_scale_inv": "columnwise_scale_inv",
    }
    _SETTINGS = {"_fp8_dtype": "fp8_dtype", "_is_2D_scaled": "is_2D_scaled"}
    _fp8_dtype: DType
    _is_2D_scaled: bool
    _FSDP_BLOCK_LEN = BLOCK

    def __new__(
        cls,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
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
        settings = {"_fp8_dtype": DType.cast(fp8_dtype), "_is_2D_scaled": is_2D_scaled}
        return cls._made(arrays, settings, quantizer, args, fake_dtype, kwargs)

    @classmethod
    def _settings_of(cls, quantizer: Any) -> Dict[str, Any]:
        return {"fp8_dtype": quantizer.dtype, "is_2D_scaled": quantizer.block_scaling_dim == 2}

    @classmethod
    def stored(
        cls, side: str, parts: List[Tensor], shape: torch.Size, quantizer: Any
    ) -> Dict[str, Tensor]:
        codes, scales = parts
        scales = padded(
            scales if quantizer.block_scaling_dim == 2 else scales.t(), 1, 4
        ).contiguous()
        turned = shape if side == "row" else quantizer.get_columnwise_shape(shape)
        return {f"_{side}wise_data": codes.reshape(turned), f"_{side}wise_scale_inv": scales}

    def _parts(self, side: str) -> List[Tensor]:
        data, scales = (getattr(self, name) for name in self._SIDES[side])
        rows, cols = matrix_shape(self.size())
        height, width = (rows, cols) if side == "row" else (cols, rows)
        blocks = -(-width // BLOCK)
        if self._is_2D_scaled:
            scales = scales[:, :blocks]
        else:
            scales = scales[:blocks, :height].t()
        return [data.reshape(height, width).contiguous(), scales.contiguous()]

    def _spec(self) -> str:
        return spec_of(
            "fp8-block", fp8_code_of(self._fp8_dtype), "128x128" if self._is_2D_scaled else "1x128"
        )

    def _stored_shape(self) -> torch.Size:
        if self._rowwise_data is not None:
            return self._rowwise_data.shape
        first, *rest = self._columnwise_data.shape
        return torch.Size((*rest, first))

    def _codes_in(self, shape: torch.Size) -> Optional[Dict[str, Tensor]]:
        kept = 2 if self._is_2D_scaled else 1
        if tuple(shape[-kept:]) != tuple(self.size()[-kept:]):
            return None
        made = {}
        if self._rowwise_data is not None:
            made["_rowwise_data"] = self._rowwise_data.view(shape)
        if self._columnwise_data is not None:
            made["_columnwise_data"] = self._columnwise_data.view(shape[-1], *shape[:-1])
        return made

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        if rowwise_usage is False and columnwise_usage is False:
            raise AssertionError("Must retain some data either columnwise or rowwise")
        super().update_usage(rowwise_usage, columnwise_usage)

    def _make_column(self) -> None:
        if not self._is_2D_scaled:
            raise RuntimeError("Cannot create columnwise data when not using 2D scaling.")
        self._create_columnwise()

    def _create_columnwise(self) -> None:
        """The column direction of squares: codes and scales, transposed."""
        codes, scales = self._parts("row")
        shape = self.size()
        self._columnwise_data = codes.t().contiguous().reshape(shape[-1], *shape[:-1])
        self._columnwise_scale_inv = padded(scales.t(), 1, 4).contiguous()

    def fsdp_buffer_fields(self) -> Tuple[str, ...]:
        if not self._is_2D_scaled:
            raise NotImplementedError(
                f"FSDP2 for {type(self).__name__} requires 2D block scaling (block_scaling_dim=2): "
                "scales of 128 values lie in columns, and workers gather rows"
            )
        return super().fsdp_buffer_fields()

    def _fsdp_logical_mn(self) -> Tuple[int, int]:
        """Rows and columns."""
        return matrix_shape(self.size())

    def fsdp_extract_buffers(self) -> Tuple[Tuple[Optional[Tensor], ...], Dict[str, Any]]:
        names = self.fsdp_buffer_fields()
        rows, _ = matrix_shape(self.size())
        if rows % BLOCK:
            raise RuntimeError(
                f"FSDP2 cannot all-gather a 2-D {type(self).__name__} whose local flattened M "
                f"dimension ({rows}) is not a multiple of {BLOCK}: its scales are those of squares"
            )
        # Workers gather rows, which are columns of the column direction.
        side = "row" if self._has("row") else "column"
        codes, scales = self._parts(side)
        turned = (codes, scales) if side == "row" else (codes.t(), scales.t())
        codes = turned[0].contiguous().reshape(self.size())
        return (codes, turned[1].contiguous()), {"direction": f"{side}wise", "field_names": names}

    def fsdp_assign_gathered(
        self, gathered: Tuple[Optional[Tensor], ...], meta: Dict[str, Any]
    ) -> None:
        codes, scales = gathered
        direction = meta["direction"]
        if direction not in ("rowwise", "columnwise"):
            raise RuntimeError(f"Invalid Float8Block FSDP gather direction: {direction!r}")
        if codes is None or scales is None:
            raise RuntimeError(
                "Float8Block FSDP gathered data and scale buffers must both be present."
            )
        rows, cols = matrix_shape(codes.shape)
        expected = (-(-rows // BLOCK), -(-cols // BLOCK))
        if tuple(scales.shape) != expected:
            raise RuntimeError(
                "Float8Block FSDP gathered scale geometry does not match gathered data: got scale "
                f"shape {tuple(scales.shape)}, expected {expected}"
            )
        if direction == "columnwise":
            codes = codes.reshape(rows, cols).t().reshape(cols, *codes.shape[:-1])
            scales = scales.t()
        setattr(self, f"_{direction}_data", codes.contiguous())
        setattr(self, f"_{direction}_scale_inv", padded(scales, 1, 4).contiguous())


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, Gathered, Weight, ArrayTensor):  # type: ignore[misc, override]
    """A tensor in FP8 with scales of 128 values or of squares."""

    _column_of_rows = True

    def __new__(
        cls,
        *args,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
        **kwargs,
    ):
        return super().__new__(
            cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype,
            quantizer, is_2D_scaled, *args, **kwargs,
        )  # fmt: skip


class Float8BlockQuantizer(ValueQuantizer):
    """FP8 with a scale for 128 values, or for squares of 128×128."""

    dtype: DType
    block_len: int
    amax_epsilon: float
    force_pow_2_scales: bool
    block_scaling_dim: int
    _CLASSES = (Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor)

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim: expected 1 or 2, got {block_scaling_dim!r}")
        fp8_code_of(fp8_dtype)  # a wrong type fails here
        self.dtype, self.block_len = DType.cast(fp8_dtype), BLOCK
        self.amax_epsilon, self.force_pow_2_scales = amax_epsilon, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def spec(self) -> str:
        words = QParams(self.force_pow_2_scales, self.amax_epsilon).words
        block = ("1x128", "128x128")[self.block_scaling_dim - 1]
        return spec_of("fp8-block", fp8_code_of(self.dtype), block, *words)

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> Tuple[int, int]:
        """The shape of the scales of a direction."""
        rows, cols = matrix_shape(shape)
        if columnwise:
            rows, cols = cols, rows
        if self.block_scaling_dim == 2:
            return -(-rows // BLOCK), up(-(-cols // BLOCK), 4)
        return -(-cols // BLOCK), up(rows, 4)

    def get_columnwise_shape(self, shape: Iterable[int]) -> Tuple[int, ...]:
        """The shape of the codes of the column direction."""
        sizes = tuple(shape)
        return (*sizes[-1:], *sizes[:-1])

    def inner_tensor_specs(
        self, shape: Tuple[int, ...]
    ) -> Dict[str, Tuple[Tuple[int, ...], torch.dtype]]:
        made: Dict[str, Tuple[Tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage:
            made["_rowwise_data"] = tuple(shape), torch.uint8
            made["_rowwise_scale_inv"] = self.get_scale_shape(shape, False), torch.float32
        if self.columnwise_usage:
            made["_columnwise_data"] = self.get_columnwise_shape(shape), torch.uint8
            made["_columnwise_scale_inv"] = self.get_scale_shape(shape, True), torch.float32
        return made

    def is_quantizable(self, inp: Tensor) -> bool:
        return whole_blocks(inp, BLOCK)

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        return Float8BlockScaling

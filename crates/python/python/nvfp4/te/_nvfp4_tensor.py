"""NVFP4, under TransformerEngine's names."""

from __future__ import annotations

import functools
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4
from nvfp4._nvfp4 import _hadamard_matrix, _hadamard_signs

from ._fsdp import Gathered
from ._format import DType, four_over_six, notice_fast_math, spec_of
from ._order import padded, swizzled, unswizzled
from ._quantizer import matrix_shape, up, whole_blocks
from ._storage import ArrayStorage
from ._tensor import ArrayTensor
from ._values import ValueQuantizer
from ._weights import Weight
from .recipe import NVFP4BlockScaling

BLOCK = 16


class NVFP4TensorStorage(ArrayStorage):
    """Bytes of two codes, [..., K/2] and transposed [K, M/2], with E4M3 scales of 16 values, padded
    with zeros to multiples of 128 rows and 4 columns, and amaxes in float32.
    """

    _ARRAYS = {
        "_rowwise_data": "rowwise_data",
        "_columnwise_data": "columnwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_scale_inv": "columnwise_scale_inv",
        "_amax_rowwise": "amax_rowwise",
        "_amax_columnwise": "amax_columnwise",
    }
    _SETTINGS = {
        "_fp4_dtype": "fp4_dtype",
        "_with_gemm_swizzled_scales": "with_gemm_swizzled_scales",
        "_row_scaled_nvfp4": "row_scaled_nvfp4",
        "_nvfp4_use_4over6": "nvfp4_use_4over6",
        "_nvfp4_e4m3_max": "nvfp4_e4m3_max",
    }
    _amax_rowwise: Any
    _amax_columnwise: Any
    _fp4_dtype: DType
    _with_gemm_swizzled_scales: bool
    _row_scaled_nvfp4: bool
    _nvfp4_use_4over6: bool
    _nvfp4_e4m3_max: int
    _SIDES = {
        "row": ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
        "column": ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
    }

    def __new__(
        cls,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        amax_rowwise: Optional[Tensor],
        amax_columnwise: Optional[Tensor],
        fp4_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        *args,
        fake_dtype: Optional[torch.dtype] = None,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        **kwargs,
    ):
        arrays = {
            "_rowwise_data": rowwise_data,
            "_rowwise_scale_inv": rowwise_scale_inv,
            "_columnwise_data": columnwise_data,
            "_columnwise_scale_inv": columnwise_scale_inv,
            "_amax_rowwise": amax_rowwise,
            "_amax_columnwise": amax_columnwise,
        }
        settings = {
            "_fp4_dtype": DType.cast(fp4_dtype),
            "_with_gemm_swizzled_scales": with_gemm_swizzled_scales,
            "_row_scaled_nvfp4": row_scaled_nvfp4,
            "_nvfp4_use_4over6": nvfp4_use_4over6,
            "_nvfp4_e4m3_max": nvfp4_e4m3_max if nvfp4_use_4over6 else 448,
        }
        return cls._made(arrays, settings, quantizer, args, fake_dtype, kwargs)

    @classmethod
    def _settings_of(cls, quantizer: Any) -> Dict[str, Any]:
        return {
            "fp4_dtype": quantizer.dtype,
            "with_gemm_swizzled_scales": quantizer.optimize_for_gemm,
            "row_scaled_nvfp4": quantizer.row_scaled_nvfp4,
            "nvfp4_use_4over6": quantizer.nvfp4_use_4over6,
            "nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max,
        }

    @classmethod
    def stored(
        cls, side: str, parts: List[Tensor], shape: torch.Size, quantizer: Any
    ) -> Dict[str, Tensor]:
        codes, scales, amax = parts
        scales = padded(scales, 128, 4)
        if quantizer.optimize_for_gemm:
            scales = swizzled(scales)
        if side == "row":
            codes = codes.reshape(*shape[:-1], codes.shape[-1])
        return dict(zip(cls._SIDES[side], (codes, scales, amax)))

    def _parts(self, side: str) -> List[Tensor]:
        data, scales, amax = (getattr(self, name) for name in self._SIDES[side])
        rows = matrix_shape(data.shape)[0] if side == "row" else data.shape[0]
        codes = data.reshape(rows, -1).contiguous()
        if self._with_gemm_swizzled_scales:
            scales = unswizzled(scales)
        return [codes, scales[: codes.shape[0], : -(-codes.shape[1] // 8)].contiguous(), amax]

    def _spec(self) -> str:
        rule = f"4over6-mae-strict-{self._nvfp4_e4m3_max}" if self._nvfp4_use_4over6 else ""
        return spec_of("nvfp4", "row-scaled" if self._row_scaled_nvfp4 else "", rule)

    def _stored_shape(self) -> torch.Size:
        if self._rowwise_data is not None:
            *lead, last = self._rowwise_data.shape
            return torch.Size((*lead, last * 2))
        first, *rest, last = self._columnwise_data.shape
        return torch.Size((*rest, last * 2, first))

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        if self._rowwise_data is None and self._columnwise_data is not None and self.size().numel():
            raise NotImplementedError("Dequantizing column-wise NVFP4 data is not implemented yet!")
        return super()._decoded(dtype)

    def _codes_in(self, shape: torch.Size) -> Optional[Dict[str, Tensor]]:
        if not shape or shape[-1] != self.size()[-1]:
            return None
        made = {}
        if self._rowwise_data is not None:
            made["_rowwise_data"] = self._rowwise_data.view(*shape[:-1], shape[-1] // 2)
        if self._columnwise_data is not None:
            made["_columnwise_data"] = self._columnwise_data.view(shape[-1], -1)
        return made

    def _make_column(self) -> None:
        if self._quantizer is None or not self._quantizer.with_2d_quantization:
            raise RuntimeError("Cannot create columnwise data without 2D quantization enabled.")
        self._create_columnwise()

    def _create_columnwise(self) -> None:
        """The column direction of squares: codes and scales, transposed."""
        codes, scales, amax = self._parts("row")
        rows, cols = matrix_shape(self.size())
        each = torch.stack((codes & 15, codes >> 4), -1).reshape(rows, -1)[:, :cols].t()
        each = torch.nn.functional.pad(each, (0, rows % 2))
        turned = scales[::BLOCK].t().repeat_interleave(BLOCK, 0)[:cols]
        parts = [
            (each[:, 0::2] | (each[:, 1::2] << 4)).contiguous(),
            turned.contiguous(),
            amax.clone(),
        ]
        for name, array in self.stored("column", parts, self.size(), self._quantizer).items():
            setattr(self, name, array)

    def _build_default_quantizer(self) -> "NVFP4Quantizer":
        return NVFP4Quantizer()

    def fsdp_buffer_fields(self) -> Tuple[str, ...]:
        # Bytes of two codes of a column belong to two rows, which may be those of two workers.
        raise NotImplementedError(
            f"{type(self).__name__} class does not implement fsdp_buffer_fields"
        )


class NVFP4Tensor(NVFP4TensorStorage, Gathered, Weight, ArrayTensor):  # type: ignore[misc, override]
    """A tensor in NVFP4. Its arrays are the tensor: what is written there is what is decoded."""

    _column_of_rows = True

    def __new__(
        cls,
        *args,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        amax_rowwise: Optional[Tensor],
        amax_columnwise: Optional[Tensor],
        fp4_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        **kwargs,
    ):
        return super().__new__(
            cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv,
            amax_rowwise, amax_columnwise, fp4_dtype, quantizer, with_gemm_swizzled_scales, *args,
            row_scaled_nvfp4=row_scaled_nvfp4, nvfp4_use_4over6=nvfp4_use_4over6,
            nvfp4_e4m3_max=nvfp4_e4m3_max, **kwargs,
        )  # fmt: skip

    def _shard(self) -> Tuple[Tuple[Optional[Tensor], ...], Dict[str, Any]]:
        rows, _ = matrix_shape(self.shape)
        if rows % BLOCK or self._rowwise_data is None:
            raise ValueError(f"FSDP2 requires rows, and a multiple of {BLOCK} of them; got {rows}")
        if self._quantizer.columnwise_usage and not self._quantizer.with_2d_quantization:
            raise ValueError(
                "FSDP2 columnwise usage requires 2D quantization: with_2d_quantization=True"
            )
        names = ("_rowwise_data", "_rowwise_scale_inv")
        return (self._rowwise_data, self._rowwise_scale_inv[:rows]), {"field_names": names}

    def fsdp_assign_gathered(
        self, gathered: Tuple[Optional[Tensor], ...], meta: Dict[str, Any]
    ) -> None:
        super().fsdp_assign_gathered(gathered, meta)
        self._rowwise_scale_inv = padded(self._rowwise_scale_inv, 128, 4)


class NVFP4Quantizer(ValueQuantizer):
    """Quantizes to NVFP4, with TransformerEngine's arguments.

    Stochastic rounding takes its offsets from torch's generator, so that it follows
    ``torch.manual_seed``.
    """

    dtype: DType
    with_rht: bool
    with_post_rht_amax: bool
    with_amax_reduction: bool
    with_2d_quantization: bool
    stochastic_rounding: bool
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    nvfp4_4over6_err_mode: str
    rht_matrix_random_sign_mask_t: int
    _CLASSES = (NVFP4TensorStorage, NVFP4Tensor)

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if with_rht and not with_post_rht_amax:
            raise ValueError(
                "with_rht needs with_post_rht_amax=True: the scale of rotated values comes from "
                "their own amax"
            )
        self.dtype = DType.cast(fp4_dtype)
        self.with_amax_reduction, self.amax_reduction_group = (
            with_amax_reduction,
            amax_reduction_group,
        )
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization, self.stochastic_rounding = (
            with_2d_quantization,
            stochastic_rounding,
        )
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        if self.nvfp4_e4m3_max not in (448, 256):
            raise ValueError("nvfp4_e4m3_max must be 448 or 256.")
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode.upper()
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError("nvfp4_4over6_err_mode must be 'MAE' or 'MSE'.")
        self.rht_matrix_random_sign_mask_t = _hadamard_signs if with_random_sign_mask else 0
        self._words(self._signs)  # an illegal combination fails here

    @property
    def rht_matrix(self) -> Tensor:
        """The matrix that rotates 16 values."""
        return _rotation(self.rht_matrix_random_sign_mask_t)

    @property
    def _signs(self) -> Optional[int]:
        return self.rht_matrix_random_sign_mask_t if self.with_rht else None

    def spec(self) -> str:
        self._notice()
        return self._words(self._signs)

    def row_spec(self) -> str:
        self._notice()
        return self._words(None)

    def _notice(self) -> None:
        # Neither squares nor 4over6 have a fast variant.
        slow = self.with_2d_quantization or self.nvfp4_use_4over6
        if not slow and not torch.compiler.is_compiling():
            notice_fast_math()

    def _words(self, signs: Optional[int]) -> str:
        return _spec(
            self.with_2d_quantization,
            self.row_scaled_nvfp4,
            four_over_six(self.nvfp4_4over6_err_mode, self.nvfp4_e4m3_max)
            if self.nvfp4_use_4over6
            else "",
            self.stochastic_rounding,
            None if signs is None else signs != 0,
        )

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> Tuple[int, int]:
        """The shape of the scales of a direction."""
        rows, cols = matrix_shape(shape)
        if columnwise:
            rows, cols = cols, rows
        return up(rows, 128), up(-(-cols // BLOCK), 4)

    @staticmethod
    def get_columnwise_shape(shape: Iterable[int]) -> Tuple[int, ...]:
        """The shape of transposed values."""
        sizes = tuple(shape)
        return (*sizes[-1:], *sizes[:-1])

    @staticmethod
    def convert_shape_for_fp4(shape: Iterable[int]) -> Tuple[int, ...]:
        """The shape of the bytes of two codes."""
        *lead, last = shape
        return (*lead, last // 2)

    def inner_tensor_specs(
        self, shape: Tuple[int, ...]
    ) -> Dict[str, Tuple[Tuple[int, ...], torch.dtype]]:
        made: Dict[str, Tuple[Tuple[int, ...], torch.dtype]] = {}
        rows, cols = matrix_shape(shape)
        if self.rowwise_usage:
            made["_rowwise_data"] = self.convert_shape_for_fp4(shape), torch.uint8
            made["_rowwise_scale_inv"] = self.get_scale_shape(shape, False), torch.uint8
        if self.columnwise_usage:
            made["_columnwise_data"] = (cols, rows // 2), torch.uint8
            made["_columnwise_scale_inv"] = self.get_scale_shape(shape, True), torch.uint8
        if self.rowwise_usage:
            made["_amax_rowwise"] = (rows if self.row_scaled_nvfp4 else 1,), torch.float32
        if self.columnwise_usage:
            made["_amax_columnwise"] = (cols if self.row_scaled_nvfp4 else 1,), torch.float32
        return made

    def is_quantizable(self, inp: Tensor) -> bool:
        return not self.row_scaled_nvfp4 and whole_blocks(inp, BLOCK)

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def _get_compatible_recipe(self) -> Any:
        return NVFP4BlockScaling


@functools.lru_cache(maxsize=None)
def _spec(squares: bool, rows: bool, rule: str, stochastic: bool, signs: Optional[bool]) -> str:
    words = ["16x16" if squares else "", "row-scaled" if rows else "", rule]
    words.append("stochastic" if stochastic else "")
    words.append("" if signs is None else "hadamard" if signs else "hadamard=0x0000")
    return nvfp4.Quantizer(spec=spec_of("nvfp4", *words), directions="both").spec


@functools.lru_cache(maxsize=None)
def _rotation(mask: int) -> Tensor:
    """The Hadamard matrix of 16 values with signs of rows, in bfloat16."""
    return torch.tensor(_hadamard_matrix(mask), dtype=torch.bfloat16)

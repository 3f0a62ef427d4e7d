"""Quantizers of FP8 and MXFP8 and of two formats at once, under TransformerEngine's names.

They are what factories return. A call gives an ``nvfp4.QuantTensor``.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from ._format import QParams, fp8_code_of, spec_of
from ._quantizer import Quantizer
from ._signature import supports


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one scale, from the tensor itself. It goes where the tensor is, whatever ``device``
    says.
    """

    @supports("rowwise", "columnwise", "force_pow_2_scales", "amax_epsilon")
    def __init__(
        self, fp8_dtype: Any, device: Any, *, rowwise: bool = True, columnwise: bool = True,
        use_existing_amax: bool = False, with_amax_reduction: bool = False, amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False, amax_epsilon: float = 0.0, scale: Optional[Tensor] = None,
        amax: Optional[Tensor] = None,
    ):  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = (
            fp8_dtype,
            force_pow_2_scales,
            amax_epsilon,
        )
        self.spec()  # a wrong type fails here

    def spec(self) -> str:
        return spec_of(
            "fp8",
            fp8_code_of(self.dtype),
            *QParams(self.force_pow_2_scales, self.amax_epsilon).words,
        )


class Float8BlockQuantizer(Quantizer):
    """FP8 with a scale for 128 values, or for squares of 128×128."""

    def __init__(
        self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True, block_scaling_dim: int = 2,
    ):  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim: expected 1 or 2, got {block_scaling_dim!r}")
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = (
            fp8_dtype,
            force_pow_2_scales,
            amax_epsilon,
        )
        self.block_scaling_dim = block_scaling_dim
        self.spec()

    def spec(self) -> str:
        words = QParams(self.force_pow_2_scales, self.amax_epsilon).words
        return spec_of(
            "fp8-block",
            fp8_code_of(self.dtype),
            ("1x128", "128x128")[self.block_scaling_dim - 1],
            *words,
        )


class MXFP8Quantizer(Quantizer):
    """MXFP8, with a scale for 32 values or for squares of 32×32."""

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.with_2d_quantization = fp8_dtype, with_2d_quantization
        self.spec()

    def spec(self) -> str:
        return spec_of(
            "mxfp8", fp8_code_of(self.dtype), "32x32" if self.with_2d_quantization else ""
        )


_SOURCES = {"original": "", "rowwise_dequantized": " from row"}


class HybridQuantizer(Quantizer):
    """One quantizer for the row direction and another one for the column direction, which is made
    from the tensor or from what the row direction decodes to.
    """

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
            if not isinstance(given, Quantizer) or isinstance(given, HybridQuantizer):
                raise TypeError(f"{name}: expected a quantizer of one format, got {given!r}")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "rowwise_quantizer and columnwise_quantizer are the same object: pass a copy() of it"
            )
        if columnwise_source not in _SOURCES:
            raise ValueError(
                f"columnwise_source: expected one of {', '.join(map(repr, _SOURCES))}, got {columnwise_source!r}"
            )
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source

    def spec(self) -> str:
        column = self.columnwise_quantizer.spec() + _SOURCES[self.columnwise_source]
        return f"{self.rowwise_quantizer.spec()} / {column}"

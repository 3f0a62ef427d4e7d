"""Factories that mix formats: TransformerEngine's examples."""

from __future__ import annotations

from typing import Any, Optional

from .._float8 import Float8CurrentScalingQuantizer
from .._format import DType
from .._hybrid import HybridQuantizer
from .._identity import IdentityQuantizer
from .._nvfp4_tensor import NVFP4Quantizer
from .._roles import DelayedScalingRequest, QuantizerRole
from .quantizer_factories import mxfp8_factory, nvfp4_factory, tensor_of


def _split(row: Any, column: Any, source: str = "rowwise_dequantized") -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source
    )


def high_precision_fwd_mxfp8_bwd_factory(role: Optional[QuantizerRole]) -> Any:
    """High precision forward, MXFP8 backward."""
    if tensor_of(role) == "grad_output":
        return mxfp8_factory(role)
    return _split(IdentityQuantizer(), mxfp8_factory(role), "original")


def mxfp8_fwd_nvfp4_bwd_factory(role: Optional[QuantizerRole]) -> Any:
    """MXFP8 forward, NVFP4 backward. The weight's NVFP4 is made from its MXFP8."""
    tensor = tensor_of(role)
    if tensor == "input":
        return _split(mxfp8_factory(role), nvfp4_factory(role), "original")
    if tensor == "weight":
        return _split(mxfp8_factory(role), NVFP4Quantizer())
    return nvfp4_factory(role) if tensor == "grad_output" else mxfp8_factory(role)


def nvfp4_1d_weight_factory(role: Optional[QuantizerRole]) -> Any:
    """As ``nvfp4_factory``, but weights have scales for 16 values of a row, and their column
    direction is made from the row direction.
    """
    return (
        _split(NVFP4Quantizer(), NVFP4Quantizer())
        if tensor_of(role) == "weight"
        else nvfp4_factory(role)
    )


def mxfp8_fwd_high_precision_bwd_factory(role: Optional[QuantizerRole]) -> Any:
    """MXFP8 forward; backward the decoded tensors of the forward pass."""
    tensor = tensor_of(role)
    if tensor in ("input", "weight"):
        return _split(mxfp8_factory(role), IdentityQuantizer())
    return IdentityQuantizer() if tensor == "grad_output" else mxfp8_factory(role)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: Optional[QuantizerRole]) -> Any:
    """In grouped layers NVFP4 forward, with a scale for each row of the input, and MXFP8 backward;
    MXFP8 elsewhere.
    """
    tensor = tensor_of(role, "grouped_linear")
    if tensor in ("input", "weight"):
        return _split(NVFP4Quantizer(row_scaled_nvfp4=tensor == "input"), mxfp8_factory(role))
    return mxfp8_factory(role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: Optional[QuantizerRole]) -> Any:
    """NVFP4 forward, with a scale for each row of the input; backward the decoded tensors of the
    forward pass.
    """
    tensor = tensor_of(role)
    if tensor in ("input", "weight"):
        return _split(NVFP4Quantizer(row_scaled_nvfp4=tensor == "input"), IdentityQuantizer())
    return IdentityQuantizer() if tensor == "grad_output" else NVFP4Quantizer()


def nvfp4_linear_fp8_dpa_factory(role: Optional[QuantizerRole]) -> Any:
    """NVFP4 for linear layers, FP8 for attention: scales of the last step for S and dP, and scales
    of the tensor itself for its other tensors.
    """
    tensor, name = tensor_of(role, "dpa"), "" if role is None or role.module_type else role.name
    if tensor in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    edges = [edge for edge in ("dpa_grad_input", "dpa_output") if edge in name]
    if (role is not None and role.module_type == "dpa") or edges:
        backward = tensor in ("do", "dqkv") or edges[:1] == ["dpa_grad_input"]
        return Float8CurrentScalingQuantizer(
            DType.kFloat8E5M2 if backward else DType.kFloat8E4M3, device=None
        )
    return nvfp4_factory(role)

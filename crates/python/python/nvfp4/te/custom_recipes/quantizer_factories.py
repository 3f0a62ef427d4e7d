"""Factories that give what TransformerEngine's recipes give."""

from __future__ import annotations

from typing import Optional

from .._float8 import Float8CurrentScalingQuantizer
from .._float8_block import Float8BlockQuantizer
from .._format import DType
from .._identity import IdentityQuantizer
from .._mxfp8 import MXFP8Quantizer
from .._nvfp4_tensor import NVFP4Quantizer
from .._roles import DelayedScalingRequest, QuantizerRole


def tensor_of(role: Optional[QuantizerRole], *modules: str) -> str:
    """The kind of a tensor of such modules, of linear layers if none is named; empty for others."""
    named = modules or ("linear", "grouped_linear")
    return role.tensor_type if role is not None and role.module_type in named else ""


def high_precision_factory(role: Optional[QuantizerRole]) -> IdentityQuantizer:
    """Leaves all tensors as they are."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: Optional[QuantizerRole]) -> DelayedScalingRequest:
    """As ``DelayedScaling()``."""
    return DelayedScalingRequest()


def current_scaling_factory(role: Optional[QuantizerRole]) -> Float8CurrentScalingQuantizer:
    """As ``Float8CurrentScaling()``: output gradients are E5M2, all else is E4M3."""
    backward = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(
        DType.kFloat8E5M2 if backward else DType.kFloat8E4M3, device=None
    )


def float8_block_scaling_factory(role: Optional[QuantizerRole]) -> Float8BlockQuantizer:
    """As ``Float8BlockScaling()``: squares for weights, rows for all else."""
    dim = 2 if tensor_of(role) == "weight" else 1
    return Float8BlockQuantizer(
        DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
    )


def mxfp8_factory(role: Optional[QuantizerRole]) -> MXFP8Quantizer:
    """As ``MXFP8BlockScaling()``."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: Optional[QuantizerRole]) -> NVFP4Quantizer:
    """As ``NVFP4BlockScaling()``: squares for weights; the Hadamard transform for all else, with
    stochastic rounding for output gradients.
    """
    if tensor_of(role) == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(
        with_rht=True, with_post_rht_amax=True, stochastic_rounding=tensor_of(role) == "grad_output"
    )

"""Products of tensors whose quantizer brings its own, as
``transformer_engine.pytorch.custom_recipes.gemm`` has them.

A quantizer with ``custom = True`` has a method ``qgemm``, which is called with the codes and scales
of both tensors: ``data`` and ``scale`` of the row direction, ``data_t`` and ``scale_t`` of the
column direction.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Optional, Tuple

import torch
from torch import Tensor


@enum.unique
class GEMMType(enum.Enum):
    """Which product of a linear layer it is."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclasses.dataclass(frozen=True)
class MMParams:
    """How a product is computed."""

    out_dtype: Optional[torch.dtype] = None
    use_split_accumulator: bool = True


# By ``grad`` and the layout. For each product: the directions of the left and the right operand.
_PRODUCTS = {(True, "NN"): GEMMType.DGRAD, (True, "NT"): GEMMType.WGRAD}
_SIDES = {GEMMType.FPROP: ("", ""), GEMMType.DGRAD: ("", "_t"), GEMMType.WGRAD: ("_t", "_t")}


def custom_gemm(
    A: Any, B: Any, workspace: Any = None, out_dtype: Optional[torch.dtype] = None,
    quantization_params: Any = None, gelu: bool = False, gelu_in: Optional[Tensor] = None,
    accumulate: bool = False, layout: str = "TN", out: Optional[Tensor] = None,
    bias: Optional[Tensor] = None, use_split_accumulator: bool = False, grad: bool = False,
) -> Tuple[Tensor, None, None, None]:  # fmt: skip
    """The product that the quantizer of ``B``, or of ``A``, computes: ``B·Aᵀ`` forward."""
    if not all(getattr(tensor, "custom", False) for tensor in (A, B)):
        raise TypeError("A and B must be custom tensors")
    left, right = B, A
    kind = _PRODUCTS.get((grad, layout), GEMMType.FPROP)
    quantizer = getattr(left, "_quantizer", None) or getattr(right, "_quantizer", None)
    if quantizer is None:
        raise ValueError("No quantizer found in QuantizedTensor objects")
    sides = list(zip((left, right), _SIDES[kind]))
    codes = [_array(of, f"data{side}", kind) for of, side in sides]
    scales = [_array(of, f"scale{side}", kind) for of, side in sides]
    params = MMParams(out_dtype, use_split_accumulator)
    y = quantizer.qgemm(
        *codes, params, left.dtype if out_dtype is None else out_dtype, *scales,
        bias if kind is GEMMType.FPROP else None,
        gemm_type=kind, qresult_x=left, qresult_w=right,
    )  # fmt: skip
    if kind is GEMMType.FPROP and len(left.original_shape) > 2:
        y = y.view(*left.original_shape[:-1], y.shape[-1])
    return y, None, None, None


def _array(tensor: Any, name: str, kind: GEMMType) -> Tensor:
    array = getattr(tensor, name)
    if array is None:
        raise ValueError(f"{kind.name} GEMM: {type(tensor).__name__} has no {name}")
    return array

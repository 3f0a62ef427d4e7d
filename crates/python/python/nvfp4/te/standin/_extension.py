"""``transformer_engine_torch``: the functions of the extension that programs call directly."""

from __future__ import annotations

import enum
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from .._algorithms import scale_of
from .._format import DType
from .._products import gemm_of_any_layout


class FP8FwdTensors(enum.IntEnum):
    """Where a tensor of a forward pass stands among a module's quantizers."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """The same of a backward pass."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


def quantize(
    tensor: Tensor, quantizer: Any, output: Any = None, noop: Optional[Tensor] = None
) -> Any:
    """Quantizes a tensor, into another one if it is given."""
    if output is None:
        return quantizer.quantize(tensor)
    return quantizer.update_quantized(tensor, output, noop_flag=noop)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """The values of a quantized tensor."""
    return tensor.dequantize(dtype=_torch_dtype(dtype))


def split_quantize(
    tensor: Tensor, split_sections: List[int], quantizer_list: List[Any], *args: Any, **kwargs: Any
) -> List[Any]:
    """Quantizes parts of a tensor's rows, each by its quantizer."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return [
        quantizer(part)
        for part, quantizer in zip(torch.split(rows, split_sections), quantizer_list)
    ]


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> Tuple[Tensor, Any]:
    """The sum of a tensor's rows, and the tensor quantized."""
    return tensor.reshape(-1, tensor.shape[-1]).sum(0), quantizer(tensor)


def generic_gemm(
    A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any,
    bias: Optional[Tensor], bias_type: Any, gelu: bool, gelu_in: Optional[Tensor], grad: bool,
    workspace: Any, workspaceSize: int, accumulate: bool, use_split_accumulator: bool,
    *args: Any, alpha: float = 1.0, beta: Optional[float] = None, **kwargs: Any,
) -> Tuple[Any, Optional[Tensor], Optional[Tensor], Any]:  # fmt: skip
    """A product of two tensors: ``general_gemm`` with the arguments of the extension, in any layout."""
    return gemm_of_any_layout(
        A, B, _torch_dtype(output_dtype), quantizer, gelu, gelu_in, alpha, beta, accumulate,
        ("T" if transA else "N") + ("T" if transB else "N"), D, bias, use_split_accumulator, grad,
    )  # fmt: skip


def _torch_dtype(dtype: Any) -> Optional[torch.dtype]:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return _TORCH[DType.cast(dtype)]


_TORCH = {
    DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16,
    DType.kByte: torch.uint8, DType.kInt32: torch.int32,
    DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2,
}  # fmt: skip


def get_cublasLt_version() -> int:
    """The version of cuBLASLt whose grouped products are called: none are."""
    return 0


class FP8TensorMeta:
    """The scales of one pass of a module: ``scale``, ``scale_inv`` and ``amax_history``."""

    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor, amax_histories: List[Tensor], scales: List[Tensor],
    amax_compute_algo: str, fp8_dtype: Any, margin: float,
) -> None:  # fmt: skip
    """Moves histories on by the amaxes of a step, and makes the scales that follow from them."""
    largest = 448.0 if DType.cast(fp8_dtype) is DType.kFloat8E4M3 else 57344.0
    amaxes = amax_reduction_buffer.split([history.shape[1] for history in amax_histories])
    for history, scale, amax in zip(amax_histories, scales, amaxes):
        if history.shape[0] > 1:
            history.copy_(torch.roll(history, -1, 0))
        history[-1].copy_(amax)
        seen = history.max(dim=0).values if amax_compute_algo == "max" else history[-1]
        scale.copy_(scale_of(seen, scale, largest, margin))
        history[0].zero_()


def _watched(noop_flag: Tensor, tensors: List[Tensor]) -> None:
    """Sets a flag if a number is not finite."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        noop_flag.fill_(1)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Any, scale: float) -> None:
    """Writes multiples of tensors into others, and sets a flag if one is not finite."""
    sources, targets = tensor_lists
    _watched(noop_flag, sources)
    for source, target in zip(sources, targets):
        target.copy_(source.float() * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Any, per_tensor: Optional[bool] = False
) -> Tuple[Tensor, Tensor]:
    """The norm of all numbers of some tensors, and that of each tensor if asked for."""
    return multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Any, inv_scale: Optional[Tensor],
    per_tensor: Optional[bool] = False,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """The same of multiples."""
    tensors = tensor_lists[0]
    each = torch.stack([tensor.float().norm() for tensor in tensors])
    each = each if inv_scale is None else each * inv_scale
    _watched(noop_flag, tensors)
    return each.norm().reshape(1), each if per_tensor else each.new_empty(0)

"""Products of quantized tensors under TransformerEngine's names, and linear layers over quantizers
that bring their own product.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4

from .custom_recipes.gemm import custom_gemm

_OWN = __name__.rpartition(".")[0]
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def is_foreign(quantizer: Any) -> bool:
    """Whether a quantizer has to be called: one with a product of its own, or of a class outside of
    this package that quantizes by itself.
    """
    if getattr(quantizer, "custom", False):
        return True
    for kind in type(quantizer).__mro__:
        if kind.__module__.startswith(_OWN):
            break
        if "quantize" in vars(kind) or "quantize_impl" in vars(kind):
            return hasattr(quantizer, "rowwise_usage")
    parts = ("rowwise_quantizer", "columnwise_quantizer")
    return any(is_foreign(part) for part in (getattr(quantizer, of, None) for of in parts) if part)


def _operand(tensor: Any, transposed: bool) -> Any:
    """What a product reads: rows whose values are summed up with those of the other operand."""
    if hasattr(tensor, "rowwise_sub_storage"):
        tensor = tensor.columnwise_sub_storage if transposed else tensor.rowwise_sub_storage
    from ._identity import IdentityTensorStorage  # which imports recipes, and they this file

    quantized = (
        None if isinstance(tensor, IdentityTensorStorage) else getattr(tensor, "quantized", None)
    )
    if quantized is None:
        values = tensor if isinstance(tensor, Tensor) else tensor.dequantize()
        values = values.reshape(-1, values.shape[-1]) if values.dim() != 2 else values
        return values.t() if transposed else values
    side = quantized.column if transposed else quantized.row
    if side is None:
        raise RuntimeError(
            f"general_gemm: {type(tensor).__name__} has no {'column' if transposed else 'row'}-wise data"
        )
    return side


def _values(operand: Any) -> Tensor:
    return operand if isinstance(operand, Tensor) else operand.dequantize(torch.float32)


def _multiplied(left: Any, right: Any, dtype: torch.dtype, split: bool) -> Tensor:
    """``left·rightᵀ``."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.matmul(left.to(right.dtype), right.t()).to(dtype)
    known = dtype if dtype in _WIDE else torch.float32
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        try:
            accumulator = "split" if split else "fast"  # of FP8 on a GPU
            return torch.as_tensor(
                nvfp4.matmul(left, right, dtype=known, accumulator=accumulator)
            ).to(dtype)
        except ValueError:
            pass  # of two formats, which their values are multiplied for
    return (_values(left).float() @ _values(right).float().t()).to(dtype)


def general_gemm(
    A: Any, B: Any, out_dtype: Optional[torch.dtype] = None, quantization_params: Any = None,
    gelu: bool = False, gelu_in: Optional[Tensor] = None, alpha: float = 1.0,
    beta: Optional[float] = None, accumulate: bool = False, layout: str = "TN",
    out: Any = None, bias: Optional[Tensor] = None, use_split_accumulator: bool = False,
    grad: bool = False, ub: Any = None, ub_type: Any = None, extra_output: Any = None,
    bulk_overlap: bool = False,
) -> Tuple[Any, Optional[Tensor], Optional[Tensor], Any]:  # fmt: skip
    """``B·Aᵀ`` for "TN", ``B·A`` for "NN", ``Bᵀ·A`` for "NT"; the product, the gradient of the
    bias, the input of the GELU and what user buffers give, which are not there.
    """
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"GEMM layout {layout} not supported.")
    if ub is not None or extra_output is not None:
        raise NotImplementedError(
            "te.general_gemm: user buffers are not supported here; leave them out"
        )
    return gemm_of_any_layout(
        A, B, out_dtype, quantization_params, gelu, gelu_in, alpha, beta, accumulate, layout, out,
        bias, use_split_accumulator, grad,
    )  # fmt: skip


def gemm_of_any_layout(
    A: Any, B: Any, out_dtype: Optional[torch.dtype], quantization_params: Any, gelu: bool,
    gelu_in: Optional[Tensor], alpha: float, beta: Optional[float], accumulate: bool, layout: str,
    out: Any, bias: Optional[Tensor], use_split_accumulator: bool, grad: bool,
) -> Tuple[Any, Optional[Tensor], Optional[Tensor], Any]:  # fmt: skip
    """``general_gemm``, and ``Bᵀ·Aᵀ`` for "TT"."""
    if any(getattr(tensor, "custom", False) for tensor in (A, B)):
        if layout == "TT":
            raise ValueError("GEMM layout TT not supported for custom tensors.")
        return custom_gemm(
            A, B, None, out_dtype, quantization_params, gelu, gelu_in, accumulate, layout, out,
            bias, use_split_accumulator, grad,
        )  # fmt: skip
    dtype = out_dtype or (out.dtype if isinstance(out, Tensor) else _dtype(B, A))
    rounded = torch.float32 if accumulate or bias is not None or gelu or alpha != 1.0 else dtype
    right = _operand(A, transposed=layout[0] == "N")
    left = _operand(B, transposed=layout[1] == "T")
    y = _multiplied(left, right, rounded, use_split_accumulator)
    y = y if alpha == 1.0 else y * alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _values(_operand(B, transposed=False)).float().sum(0).to(bias.dtype)
    elif bias is not None:
        y = y + bias
    before = None
    if gelu and grad and gelu_in is not None:
        with torch.enable_grad():
            x = gelu_in.detach().float().requires_grad_()
            (y,) = torch.autograd.grad(
                torch.nn.functional.gelu(x, approximate="tanh"), x, y.float()
            )
    elif gelu:
        before = y.to(dtype)
        y = torch.nn.functional.gelu(y, approximate="tanh")
    if accumulate and out is not None:
        y = y + out * (1.0 if beta is None else beta)
    y = y.to(dtype)
    if layout[1] == "N":
        y = y.reshape(*B.shape[:-1], y.shape[-1])
    if quantization_params is not None:
        y = quantization_params(y) if out is None else quantization_params.update_quantized(y, out)
    elif out is not None:
        y = out.copy_(y.reshape(out.shape))
    return y, bias_grad, before, None


def _dtype(*tensors: Any) -> torch.dtype:
    return next(
        tensor.dtype
        for tensor in tensors
        if isinstance(getattr(tensor, "dtype", None), torch.dtype)
    )


def general_grouped_gemm(
    A: List[Any], B: List[Any], out: List[Tensor], quantization_params: List[Any],
    out_dtype: torch.dtype, layout: str = "TN", m_splits: Optional[List[int]] = None,
    gelu: bool = False, grad: bool = False, accumulate: bool = False,
    bias: Optional[List[Tensor]] = None, use_bias: bool = False,
    use_split_accumulator: bool = False, D_dtype: Any = None, single_output: bool = False,
) -> Tuple[Any, Optional[List[Optional[Tensor]]], Optional[List[Optional[Tensor]]]]:  # fmt: skip
    """:func:`general_gemm` for each pair, into ``out``: a tensor for each, or one whose rows are
    those of all. Of tokens with scales of their own that one is given back without its list, as
    TransformerEngine does.
    """
    outs = list(out)
    if single_output:
        assert m_splits is not None
        outs = list(torch.split(out[0], m_splits))
    biases: List[Any] = list(bias) if use_bias and bias is not None else [None] * len(A)
    made: List[Tuple[Any, Any, Any, Any]] = []
    for index, (a, b) in enumerate(zip(A, B)):
        if b.shape[0] == 0 or outs[index].numel() == 0:
            if layout == "NT" and not accumulate:
                outs[index].zero_()
            made.append((outs[index], None, None, None))
            continue
        made.append(
            general_gemm(
                a, b, out_dtype, None, gelu, None, 1.0, None, accumulate, layout, outs[index],
                biases[index], use_split_accumulator, grad,
            )  # fmt: skip
        )
    alone = single_output and any(getattr(b, "_row_scaled_nvfp4", False) for b in B)
    return out[0] if alone else out, [one[1] for one in made], [one[2] for one in made]


class _Foreign(torch.autograd.Function):
    """``x·wᵀ`` by quantizers of which one brings its own product."""

    @staticmethod
    def forward(ctx, x, weight, bias, quantizers):
        q = quantizers
        learns = x.requires_grad or weight.requires_grad
        q["input"].set_usage(rowwise=True, columnwise=learns)
        q["weight"].set_usage(rowwise=True, columnwise=learns)
        ctx.quantizers, ctx.shape, ctx.dtypes = q, x.shape, (x.dtype, weight.dtype)
        x = x.detach().reshape(-1, x.shape[-1])
        qx, qw = q["input"](x), q["weight"](weight.detach().to(x.dtype))
        ctx.tensors = (qx, qw) if learns else None
        y = general_gemm(qw, qx, x.dtype)[0]
        y = y if bias is None else y + bias.to(y.dtype)
        return y.reshape(*ctx.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        (qx, qw), (x_dtype, w_dtype) = ctx.tensors, ctx.dtypes
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        wants_x, wants_w, wants_bias, _ = ctx.needs_input_grad
        quantizer = ctx.quantizers["grad_output"]
        quantizer.set_usage(rowwise=True, columnwise=True)
        q = quantizer(rows)
        dx = (
            general_gemm(qw, q, x_dtype, layout="NN", grad=True)[0].reshape(ctx.shape)
            if wants_x
            else None
        )
        dw = general_gemm(qx, q, w_dtype, layout="NT", grad=True)[0] if wants_w else None
        return dx, dw, rows.sum(0) if wants_bias else None, None


def foreign_linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], quantizers: Dict[str, Any]
) -> Tensor:
    """A linear layer over quantizers of its input, weight and output's gradient, as
    TransformerEngine computes it: each is called, and products are those of :func:`general_gemm`.
    """
    for slot, quantizer in quantizers.items():
        if not hasattr(quantizer, "set_usage"):
            raise NotImplementedError(
                f"the factory returned {quantizer!r} for the {slot} beside a quantizer of one's own class; "
                "return a quantizer for every tensor of such a layer"
            )
    return _Foreign.apply(x, weight, bias, quantizers)

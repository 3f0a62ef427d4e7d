"""``y = x·wᵀ + bias`` where no tensor is quantized: torch's products, with nothing copied."""

from __future__ import annotations

import torch

from ._main_grad import settled
from ._once import once


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, main=None, later=None):
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.main, ctx.later = None if bias is None else bias.dtype, main, later
        return product(x, weight, bias)

    @staticmethod
    @once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = torch.mm(dy.to(x.dtype), weight.to(x.dtype)) if needs_x else None
        dw = None
        if needs_weight:
            dw = settled(
                ctx.main, ctx.later, lambda: torch.mm(dy.t().to(weight.dtype), x.to(weight.dtype))
            )
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None


def product(x, weight, bias):
    """The forward pass alone."""
    y = torch.mm(x, weight.to(x.dtype).t())
    return y if bias is None else y + bias.to(x.dtype)

"""NVFP4 in plain torch, by the formulas of docs/numerics.md: numbers that are rounded to the format
and stay floats, and a linear layer that multiplies them as the recipe `nvfp4` says. Nothing of the
package is used here, so that what such a layer learns can be held against `nvfp4.torch`.
"""

import torch
from torch import nn

SIGNS = 0xD7E8


def block_scales(x: torch.Tensor, square: bool = False) -> torch.Tensor:
    """What the largest E2M1 value, 6, stands for in the block of each element, divided by 6."""
    rows, columns = x.shape
    tall = 16 if square else 1
    blocks = x.abs().view(rows // tall, tall, columns // 16, 16).amax((1, 3))
    encode = 448 * 6 / x.abs().max()
    sixth = torch.tensor(1 / 6)  # in this order: scales of bfloat16 numbers are often ties
    scales = (blocks * (encode * sixth)).to(torch.float8_e4m3fn).float() / encode
    return scales.repeat_interleave(tall, 0).repeat_interleave(16, 1)


def rounded(x: torch.Tensor, square: bool = False, draws: torch.Generator | None = None):
    """x as NVFP4 holds it: to nearest, or, with a generator, up or down by chance."""
    scales = block_scales(x, square)
    scaled = torch.where(scales > 0, x / scales, 0).clamp(-6, 6)
    step = scaled.abs().clamp(min=1).log2().floor().exp2() / 2
    steps = scaled / step
    if draws is None:
        return steps.round() * step * scales
    return (steps + torch.rand(steps.shape, generator=draws)).floor() * step * scales


def clipped(x: torch.Tensor) -> torch.Tensor:
    """What rounding by chance has as its mean: a block's scale is rounded too, and may be too small
    for the block's largest values.
    """
    largest = 6 * block_scales(x)
    return torch.minimum(torch.maximum(x, -largest), largest)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The transform of each 16 elements of a row, rounded to bfloat16."""
    places = range(16)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() / 4 for j in places] for i in places])
    signs = torch.tensor([-1.0 if SIGNS >> i & 1 else 1.0 for i in places])
    return (x.unflatten(1, (-1, 16)) * signs @ matrix).flatten(1).bfloat16().float()


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, draws):
        ctx.save_for_backward(x, weight)
        ctx.draws = draws
        return rounded(x) @ rounded(weight, square=True).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = rounded(dy, draws=ctx.draws) @ rounded(weight, square=True)
        columns = rounded(hadamard(dy.t().contiguous()), draws=ctx.draws)
        dw = columns @ rounded(hadamard(x.t().contiguous())).t()
        return dx, dw, None


class Linear(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, weight: nn.Parameter, draws: torch.Generator):
        super().__init__()
        self.weight, self.draws = weight, draws

    def forward(self, x):
        y = _Products.apply(x.flatten(0, -2), self.weight, self.draws)
        return y.unflatten(0, x.shape[:-1])


def convert(model: nn.Module, seed: int) -> None:
    """Gives every linear layer but the head these products."""
    draws = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Linear(module.weight, draws))

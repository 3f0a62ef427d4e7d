"""Activations in 4 bits by the rule of docs/numerics.md §3.2, written in torch. Sums are binary64, which holds them exactly."""

import torch

from forms import E2M1, nibbles


def rounded(x):
    """The E2M1 value nearest to each number, ties to the even code."""
    grid = E2M1[:8].to(x.dtype)
    middles = (grid[1:] + grid[:-1]) / 2
    above = torch.bucketize(x.abs(), middles, right=False)  # a tie goes down ...
    tie = (above < 7) & (x.abs() == middles[above.clamp(max=6)])
    above = above + (tie & (above % 2 == 1))  # ... unless the code there is odd
    return torch.where(x < 0, -grid[above], grid[above])


def quantized(x, g):
    """Code values and scales of activations in binary32 under the stored scale `g`."""
    blocks = x.unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / (torch.tensor(6.0) * g)).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    divisors = (scales * g)[..., None]
    values = torch.where(divisors == 0, torch.zeros(()), rounded(blocks / torch.where(divisors == 0, torch.ones(()), divisors)))
    values = torch.where(scales[..., None] == 0, torch.zeros(()), values)
    return values.double(), scales.double()


def product(x, stored, module):
    """The output of a layer of a checkpoint for its input, in binary32."""
    if f"{module}.weight_packed" in stored:
        packed, one = stored[f"{module}.weight_packed"], torch.ones(())
        g, weight = (one / stored[f"{module}.{name}_global_scale"].reshape(()) for name in ("input", "weight"))
    else:
        packed, g, weight = (stored[f"{module}.{name}"] for name in ("weight", "input_scale", "weight_scale_2"))
    values, scales = quantized(x, g)
    left = (values * scales[..., None]).flatten(-2)
    right = nibbles(packed) * stored[f"{module}.weight_scale"].double().repeat_interleave(16, 1)
    sums = (left @ right.T).float()
    return sums * (g * weight)

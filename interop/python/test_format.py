"""`nvfp4.torch` beside NVFP4 in plain torch (plain.py): rounding, and the means of stochastic
gradients. test_curve.py has the loss over 300 steps.
"""

import plain
import pytest
import torch

import nvfp4.torch


def test_plain_torch_rounds_as_the_package_does():
    torch.manual_seed(0)
    for square in (False, True):
        x = torch.randn(64, 96) * torch.randn(64, 1).exp()
        ours = nvfp4.quantize(x, tile="16x16" if square else "1x16").dequantize()
        assert torch.allclose(ours, plain.rounded(x, square), rtol=1e-6, atol=0)


def gradients(layer, x, dy, seed):
    torch.manual_seed(seed)
    layer.weight.grad = None
    x = x.detach().requires_grad_()
    layer(x).backward(dy)
    return x.grad.double(), layer.weight.grad.double()


def test_stochastic_gradients_have_the_exact_ones_as_their_mean():
    torch.manual_seed(0)
    layer = nvfp4.torch.Linear(96, 64, bias=False, recipe="nvfp4")
    x, dy = torch.randn(128, 96), torch.randn(128, 64)
    draws = [torch.stack(each) for each in zip(*(gradients(layer, x, dy, i) for i in range(256)))]
    columns = [plain.hadamard(each.t().contiguous()) for each in (dy, x)]
    exact = (
        plain.clipped(dy).double() @ plain.rounded(layer.weight.detach(), square=True).double(),
        plain.clipped(columns[0]).double() @ plain.rounded(columns[1]).double().t(),
    )
    for drawn, mean in zip(draws, exact):
        error = (drawn.mean(0) - mean) / (drawn.std(0) / len(drawn) ** 0.5)
        # Of so many standard normal numbers (6144 at least) the mean square is 1 ± 0.018, the mean
        # 0 ± 0.013, and one in 5000 times any is beyond 5.5. Allowed is about four times that:
        # numbers of a row share draws.
        assert error.square().mean().item() == pytest.approx(1, abs=0.08)
        assert error.abs().max() < 5.5
        assert abs(error.mean()) < 0.06

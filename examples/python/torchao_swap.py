"""Takes a model that torchao has quantized over to nvfp4 and back, on the CPU, and prints what is
equal.

    pip install torchao
    python examples/python/torchao_swap.py

torchao's `quantize_` makes the weights of a model NVFP4. Their bytes become `nvfp4.QuantTensor`s,
which `nvfp4.matmul` multiplies with; then they become torchao's tensors again. Nothing is quantized
a second time, so nothing is lost on the way.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import linear
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import quantize_

import nvfp4
import nvfp4.torch


class Product(nn.Module):
    """A linear layer whose weight is an `nvfp4.QuantTensor`, for inference."""

    def __init__(self, theirs: nn.Linear):
        super().__init__()
        self.weight, self.bias = nvfp4.torch.from_torchao(theirs.weight), theirs.bias

    def forward(self, x):
        y = nvfp4.matmul(
            x.reshape(-1, x.shape[-1]), self.weight, bias=self.bias.detach().float(), dtype=x.dtype
        )
        return y.reshape(*x.shape[:-1], -1)


def over(model: nn.Module) -> nn.Module:
    """A copy of a model of torchao with our layers."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and isinstance(layer.weight, NVFP4Tensor):
            model.set_submodule(name, Product(layer))
    return model


def back(model: nn.Module, like: nn.Module) -> nn.Module:
    """A copy of a model of torchao with the weights of ours."""
    like = copy.deepcopy(like)
    for name, layer in model.named_modules():
        if isinstance(layer, Product):
            theirs = like.get_submodule(name)
            weight = nvfp4.torch.to_torchao(layer.weight, like=theirs.weight)
            theirs.weight = nn.Parameter(weight, requires_grad=False)
    return like


def said(what: str, equal: bool) -> None:
    print(f"{what:<58} {'equal' if equal else 'different'}")


def main():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    x = torch.randn(32, 256).bfloat16()
    theirs = copy.deepcopy(plain)
    quantize_(theirs, NVFP4WeightOnlyConfig())
    ours = over(theirs)
    again = back(ours, theirs)

    for name, input in (("0", x), ("2", theirs[:2](x).detach())):
        weight, q = theirs.get_submodule(name).weight, ours.get_submodule(name).weight
        made = nvfp4.quantize(
            plain.get_submodule(name).weight.detach(), profile="torchao", layout="swizzled"
        )
        said(f"layer {name}: bytes of torchao, bytes of nvfp4.quantize", q == made)
        said(
            f"layer {name}: decoded by torchao, decoded by nvfp4",
            torch.equal(weight.dequantize(torch.float32), q.dequantize()),
        )
        products = linear(input, weight), linear(input, q.dequantize("bfloat16"))
        said(f"layer {name}: torch's product with either", torch.equal(*products))
    with torch.no_grad():
        expected, y = theirs(x), ours(x)
        said("the model after nvfp4 and back", torch.equal(again(x), expected))
    error = (y - expected).float().norm() / expected.float().norm()
    print(
        f"the model with nvfp4.matmul: {error:.1e} from torchao's, "
        "which rounds decoded weights to bfloat16 before it multiplies"
    )
    assert error < 2**-7


if __name__ == "__main__":
    main()

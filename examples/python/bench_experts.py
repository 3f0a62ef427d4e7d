"""A layer of experts, forward and backward: ``nvfp4.torch.GroupedLinear`` beside bf16, as a loop of
``torch.nn.functional.linear`` and as ``torch.nn.functional.grouped_mm`` where torch has it.

    python bench_experts.py
    python bench_experts.py --experts 8 64 --tokens 16384 --features 2048 --hidden 1024
"""

import argparse

import torch
from torch.nn import functional
from turns import in_turns, keep_busy, machine

import nvfp4.torch

RECIPES = ["nvfp4", "mxfp8", "current_scaling"]
SETTINGS = {"device": "cuda", "dtype": torch.bfloat16}


class Loop(torch.nn.Module):
    """bf16, an expert after the other."""

    def __init__(self, experts, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, outputs, inputs, **SETTINGS) * inputs**-0.5)

    def forward(self, x, splits):
        parts = zip(x.split(splits), self.weight)
        return torch.cat([functional.linear(tokens, weight) for tokens, weight in parts])


class Grouped(Loop):
    """bf16 in one launch."""

    def forward(self, x, splits):
        ends = torch.tensor(splits, device="cuda").cumsum(0).int()
        return functional.grouped_mm(x, self.weight.mT, offs=ends)


def step(layer, x, dy, splits):
    """Forward and backward."""

    def run():
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        nvfp4.torch.weights_changed(layer)  # as after the step of an optimizer
        layer(x, splits).backward(dy)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="presets")
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--features", type=int, default=7168)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=float, default=5, metavar="SECONDS")
    args = parser.parse_args()

    print(f"| {args.tokens} tokens, {args.features} to {args.hidden} | experts | GPU µs | × bf16 | host µs |")
    print("|---|---|---|---|---|")
    for experts in args.experts:
        shape = (experts, args.features, args.hidden)
        layers = {"bf16": Loop(*shape)}
        if hasattr(functional, "grouped_mm"):
            layers["bf16, grouped_mm"] = Grouped(*shape)
        for name in args.recipes:
            layers[name] = nvfp4.torch.GroupedLinear(*shape, bias=False, recipe=name, **SETTINGS)
        # Every other expert has half as many tokens more, the rest half as many less.
        each = args.tokens // experts
        splits = [each + (each // 2 if expert % 2 else -(each // 2)) for expert in range(experts)]
        x, dy = (torch.randn(sum(splits), size, **SETTINGS) for size in (args.features, args.hidden))
        works = {name: step(layer, x.clone().requires_grad_(), dy, splits) for name, layer in layers.items()}
        keep_busy(works["bf16"], args.warm)
        times = in_turns(works, args.rounds)
        for name, (gpu, host) in times.items():
            print(f"| {name} | {experts} | {1e3 * gpu:.0f} | {gpu / times['bf16'][0]:.2f} | {1e3 * host:.0f} |")
    print(machine())


if __name__ == "__main__":
    main()

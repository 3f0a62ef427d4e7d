"""How long a training step takes in each recipe, beside bf16.

Forward and backward of a transformer on one GPU, without an optimizer; every linear layer becomes one of
``nvfp4.torch`` by ``convert_module``. Contenders take turns, after the chip was kept busy for a while: a cool chip gives
other ratios.

    python bench_step.py
    python bench_step.py --recipes nvfp4 current_scaling --layers 2 --graphs
"""

import argparse
import copy
import functools

import torch
from torch import nn
from torch.nn import functional
from turns import captured, in_turns, keep_busy, machine

import nvfp4.torch

RECIPES = [
    "nvfp4",
    "nvfp4_4over6",
    "nvfp4_row_scaled",
    "mxfp8",
    "current_scaling",
    "delayed_scaling",
    "float8_block_scaling",
]


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a norm."""

    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


def step(model, x):
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x)
    y.backward(torch.ones_like(y))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="presets, or rule files")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--bias", action="store_true", help="linear layers with a bias")
    parser.add_argument("--graphs", action="store_true", help="replay each step as a CUDA graph")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds of load before anything is timed")
    args = parser.parse_args()

    torch.manual_seed(0)
    with torch.device("cuda"):
        blocks = [Block(args.width, args.heads, args.bias) for _ in range(args.layers)]
        plain = nn.Sequential(*blocks).bfloat16()
        x = torch.randn(args.batch, args.tokens, args.width).bfloat16().requires_grad_()
    models = {"bf16": plain}
    for name in args.recipes:
        recipe = nvfp4.Recipe.from_file(name) if name.endswith(".toml") else name
        models[name] = copy.deepcopy(plain)
        nvfp4.torch.convert_module(models[name], recipe=recipe)
    steps = {}
    for name, model in models.items():
        for _ in range(2):
            step(model, x)
        work = functools.partial(step, model, x)
        steps[name] = captured(work) if args.graphs else work

    keep_busy(steps["bf16"], args.warmup)
    times = in_turns(steps, args.rounds)
    print(machine())
    print(f"{args.layers} layers of width {args.width}, {args.batch} × {args.tokens} tokens, forward and backward")
    print(f"| {'recipe':<22} | {'ms':>7} | × bf16 | host ms |\n|{'-' * 24}|{'-' * 9}|--------|---------|")
    for name, (ms, host) in times.items():
        print(f"| {name:<22} | {ms:7.2f} | {ms / times['bf16'][0]:6.3f} | {host:7.2f} |")


if __name__ == "__main__":
    main()

"""Tokens a second of a GPT that trains, beside bf16: 12 layers of width 1024, 32 × 1024 tokens, AdamW.

    python bench_gpt.py
    python bench_gpt.py --recipes nvfp4 mxfp8 --batch 8
"""

import argparse
import copy

import torch
from bench_step import Block
from torch import nn
from torch.nn import functional
from turns import in_turns, keep_busy, machine

import nvfp4.torch


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(layers)))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.lm_head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["nvfp4", "current_scaling"], metavar="RECIPE", help="presets")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm", type=float, default=10, metavar="SECONDS")
    args = parser.parse_args()

    torch.manual_seed(0)
    plain = Gpt(args.layers, args.width, args.width // 64, args.vocabulary, args.length).to("cuda", torch.bfloat16)
    count = sum(parameter.numel() for parameter in plain.parameters())
    models = {"bf16": plain}
    for name in args.recipes:
        models[name] = nvfp4.torch.convert_module(copy.deepcopy(plain), name).model
    tokens = torch.randint(args.vocabulary, (args.batch, args.length + 1), device="cuda")

    def step_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def step():
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            nvfp4.torch.update_scales(model)

        return step

    works = {name: step_of(model) for name, model in models.items()}
    keep_busy(works["bf16"], args.warm)
    times = in_turns(works, args.rounds)
    each = {name: args.batch * args.length / max(gpu, host) for name, (gpu, host) in times.items()}
    print(f"{count / 1e6:.0f} M parameters, {args.batch} × {args.length} tokens, {machine()}")
    print("| recipe | ms a step | host ms | thousand tokens/s | of bf16 |\n|---|---|---|---|---|")
    for name, (gpu, host) in times.items():
        print(f"| {name} | {gpu:.1f} | {host:.1f} | {each[name]:.0f} | {each[name] / each['bf16']:.2f} |")


if __name__ == "__main__":
    main()

"""Fine-tunes a small model on the CPU, once in bf16 and once in NVFP4, and prints the losses side by side.

    python examples/python/finetune.py [--steps 60] [--recipe nvfp4]

The model is a small transformer over characters. It is first trained on one text; then, from that state, it is fine-tuned on another text in
both precisions, with the same batches. Everything is computed here: nothing is downloaded.
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional

import nvfp4.torch

FIRST = "the cat sat on the mat and the dog sat by the door while the rain fell on the roof and the wind blew. " * 20
SECOND = "a bird in the hand is worth two in the bush, and a stitch in time saves nine, as every sailor knows. " * 20
ALPHABET = sorted(set(FIRST + SECOND))
CONTEXT = 32


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Predicts the next character."""

    def __init__(self, width: int = 64, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(model: nn.Module, text: str, steps: int, rate: float) -> list:
    """Trains, and gives the loss of every step. The same seed draws the same batches."""
    data = torch.tensor([ALPHABET.index(character) for character in text])
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    starts, losses = torch.Generator().manual_seed(1), []
    torch.manual_seed(2)
    for _ in range(steps):
        begin = torch.randint(len(data) - CONTEXT - 1, (8,), generator=starts)
        batch = torch.stack([data[i : i + CONTEXT + 1] for i in begin])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nvfp4.torch.update_scales(model)  # for recipes with delayed scaling; others have nothing to update
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--recipe", default="nvfp4")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    base = Model()
    train(base, FIRST, 60, 3e-3)

    plain, quantized = base, copy.deepcopy(base)
    # The head stays in bf16, as it does in most recipes.
    print(nvfp4.torch.convert_module(quantized, arguments.recipe, filter_fn=lambda layer, name: name != "head").line)
    losses = [train(model, SECOND, arguments.steps, 1e-3) for model in (plain, quantized)]

    print(f"{'step':>5} {'bf16':>8} {arguments.recipe:>8}")
    for step in sorted({*range(0, arguments.steps, max(1, arguments.steps // 10)), arguments.steps - 1}):
        print(f"{step:>5} {losses[0][step]:>8.4f} {losses[1][step]:>8.4f}")
    last = [sum(loss[-10:]) / len(loss[-10:]) for loss in losses]
    print(f"mean of the last 10: bf16 {last[0]:.4f}, {arguments.recipe} {last[1]:.4f}, {100 * (last[1] / last[0] - 1):+.1f} %")


if __name__ == "__main__":
    main()

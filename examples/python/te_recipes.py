"""Trains a small stack of `te.TransformerLayer`s under each of TransformerEngine's recipes, with
attention in high precision, in FP8 or MXFP8 (`fp8_dpa`), and with tensors that attention hands over
quantized (`fp8_mha`).

    python examples/python/te_recipes.py [--steps 20] [--layers 2] [--device cpu|cuda]

The data are sequences that a formula gives: nothing is downloaded. It runs on the CPU, and on a GPU
too if there is one. A line for each recipe has the loss of the first and of the last step. The
script fails if a loss is not finite or does not fall.
"""

import argparse
import math
import sys

import torch
from torch import nn
from torch.nn import functional

import nvfp4.te as te
from nvfp4.te.custom_recipes import quantizer_factories, quantizer_factory_zoo

WORDS, CONTEXT, BATCH = 32, 32, 8


def recipes() -> dict:
    """A recipe of every class, by what it is called here."""
    fp8 = {"fp8_dpa": True}
    both = {"fp8_dpa": True, "fp8_mha": True}
    zoo = quantizer_factory_zoo.nvfp4_linear_fp8_dpa_factory
    return {
        "DelayedScaling": te.DelayedScaling(amax_history_len=4),
        "DelayedScaling, fp8_dpa": te.DelayedScaling(amax_history_len=4, **fp8),
        "DelayedScaling, fp8_mha": te.DelayedScaling(amax_history_len=4, **both),
        "Float8CurrentScaling": te.Float8CurrentScaling(),
        "Float8CurrentScaling, fp8_dpa": te.Float8CurrentScaling(**fp8),
        "Float8CurrentScaling, fp8_mha": te.Float8CurrentScaling(**both),
        "MXFP8BlockScaling": te.MXFP8BlockScaling(),
        "MXFP8BlockScaling, fp8_dpa": te.MXFP8BlockScaling(**fp8),
        "Float8BlockScaling": te.Float8BlockScaling(),
        "NVFP4BlockScaling": te.NVFP4BlockScaling(),
        "CustomRecipe, nvfp4": te.CustomRecipe(quantizer_factories.nvfp4_factory),
        "CustomRecipe, nvfp4 with fp8_dpa": te.CustomRecipe(zoo, **fp8),
        "CustomRecipe, mxfp8 with fp8_dpa": te.CustomRecipe(quantizer_factories.mxfp8_factory, **fp8),
    }


class Model(nn.Module):
    """Predicts the next word."""

    def __init__(self, layers: int, width: int = 64, heads: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.angles = te.RotaryPositionEmbedding(width // heads)(CONTEXT)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                width, 2 * width, heads, num_gqa_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
                attn_input_format="bshd", name=f"layers.{number}",
            )  # fmt: skip
            for number in range(layers)
        )
        self.head = te.LayerNormLinear(width, WORDS, name="head")

    def forward(self, words: torch.Tensor, turned: bool) -> torch.Tensor:
        x = self.embedding(words)
        angles = self.angles.to(x.device) if turned else None
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(x)


def batch(generator: torch.Generator, device: str) -> torch.Tensor:
    """Sequences in which a word follows from the one before, [batch, context + 1]."""
    start, step = torch.randint(WORDS, (2, BATCH, 1), generator=generator)
    return ((start + (step % 4 + 1) * torch.arange(CONTEXT + 1)) % WORDS).to(device)


def train(recipe, steps: int, layers: int, device: str) -> list:
    """The loss of every step."""
    torch.manual_seed(1)
    # What attention hands over is turned in between with rotary embeddings, so fp8_mha has none.
    turned = not getattr(recipe, "fp8_mha", False)
    model = Model(layers).to(device)
    if device == "cuda":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        words = batch(generator, device)
        with te.autocast(recipe=recipe):
            logits = model(words[:, :-1], turned)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), action="append")
    given = parser.parse_args()
    devices = given.device or ["cpu"] + ["cuda"] * torch.cuda.is_available()
    wrong = 0
    for device in devices:
        for name, recipe in recipes().items():
            losses = train(recipe, given.steps, given.layers, device)
            fits = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
            wrong += not fits
            says = "" if fits else "  not finite, or it does not fall"
            print(f"{device:4}  {name:34} {losses[0]:.4f} → {losses[-1]:.4f}{says}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

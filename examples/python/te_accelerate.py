"""Trains a small model with Hugging Face Accelerate in FP8, by its way through TransformerEngine.

    python -m nvfp4.te examples/python/te_accelerate.py [--steps 20] [--mxfp8]

The program knows Accelerate and torch alone; ``nvfp4.te`` stands in for TransformerEngine, so it
runs on a CPU too. Accelerate replaces linear layers and norms, and wraps the model in an autocast.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mxfp8", action="store_true", help="MXFP8 instead of delayed scaling")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)
    )
    recipe = (
        TERecipeKwargs(use_mxfp8_block_scaling=True)
        if asked.mxfp8
        else TERecipeKwargs(amax_history_len=16, amax_compute_algo="max")
    )
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe], cpu=not torch.cuda.is_available()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    print(
        *dict.fromkeys(f"{type(m).__module__}.{type(m).__name__}" for m in model.modules()),
        sep="\n",
    )
    target = torch.randn(64, 64, device=accelerator.device)
    for step in range(asked.steps):
        x = torch.randn(32, 64, device=accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x).float(), x @ target / 8)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, asked.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

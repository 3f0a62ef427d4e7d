"""Is it the format? The loss of a small model over 300 steps, with `nvfp4.torch` and with NVFP4 in
plain torch (plain.py). Takes minutes, so it runs with `--peers` alone.
"""

import sys
from pathlib import Path

import plain
import torch
from torch.nn import functional

import nvfp4.torch

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "crates/cli/text/devils-dictionary.txt"
sys.path.append(str(ROOT / "examples/python"))

from llama import Llama, Shape  # noqa: E402


def curve(convert, seed, steps):
    """Losses of a small model whose weights and batches are always the same."""
    torch.manual_seed(0)
    model = Llama(Shape(layers=2, width=64, hidden=128, heads=4, kv_heads=2, context=64))
    convert(model, seed)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    batches = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, (0.9, 0.95))
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (8,), generator=batches)
        batch = torch.stack([text[i : i + 65] for i in starts])
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def ours(model, seed):
    report = nvfp4.torch.convert_module(model, "nvfp4", seed=seed)
    assert len(report.converted) == 14, report


def test_300_steps_follow_the_curve_of_plain_torch():
    runs = {
        name: torch.stack([curve(convert, seed, 300) for seed in range(1, 5)])
        for name, convert in [("ours", ours), ("plain", plain.convert)]
    }
    for window in (slice(50, 100), slice(150, 200), slice(250, 300)):
        ends = {name: losses[:, window].mean(1) for name, losses in runs.items()}
        spread = max(each.max() - each.min() for each in ends.values())
        assert abs(ends["ours"].mean() - ends["plain"].mean()) <= spread, ends

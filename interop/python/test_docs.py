"""The examples of the guide and of the README run, and so does the program beside them."""

import pathlib
import re
import subprocess
import sys

import pytest
import torch

import nvfp4

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        torch.manual_seed(0)
        names = {
            "nvfp4": nvfp4,
            "x": torch.randn(32, 1024),
            "w": nvfp4.quantize(torch.randn(64, 1024)),
            "model": torch.nn.Sequential(torch.nn.Linear(64, 64)),
        }
        exec(compile(block, page, "exec"), names)


def test_the_example_fine_tunes():
    program = [sys.executable, str(ROOT / "examples/python/finetune.py"), "--steps", "4"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "bf16" in done.stdout and "mean of the last" in done.stdout

"""The examples of the guide and of the README run, and so does the program beside them."""

import pathlib
import re
import subprocess
import sys

import torch

import nvfp4

ROOT = pathlib.Path(__file__).parents[2]


def blocks(page):
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found
    return found


def test_the_example_of_the_readme_runs_with_nothing_but_what_its_first_line_says():
    (block,) = blocks("README.md")
    said = "# x, w: float32 matrices, [tokens, features] and [outputs, features]; model: a torch.nn.Module"
    assert block.splitlines()[0] == said
    torch.manual_seed(0)
    names = {"x": torch.randn(32, 64), "w": torch.randn(48, 64), "model": torch.nn.Sequential(torch.nn.Linear(64, 64))}
    exec(compile(block, "README.md", "exec"), names)
    assert names["y"].shape == (32, 48)


def test_the_examples_of_the_guide_run():
    for block in blocks("docs/python.md"):
        if "convert(" in block:
            continue  # it needs a checkpoint: crates/python/tests/test_docs.py
        if "torchao" in block:
            continue  # it needs torchao: test_torchao.py
        torch.manual_seed(0)
        names = {"nvfp4": nvfp4, "x": torch.randn(32, 1024), "model": torch.nn.Sequential(torch.nn.Linear(64, 64))}
        exec(compile(block, "docs/python.md", "exec"), names)


def test_the_example_fine_tunes():
    program = [sys.executable, str(ROOT / "examples/python/finetune.py"), "--steps", "4"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "bf16" in done.stdout and "mean of the last" in done.stdout

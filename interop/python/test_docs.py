"""The examples of the guide and of the README run, and so does the program beside them."""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def blocks(page):
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found
    return found


def test_the_examples_run_as_they_are_printed(tmp_path, monkeypatch):
    """Each by itself, with nothing added, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    run = 0
    for page in ("README.md", "docs/python.md", "docs/transformer-engine.md"):
        for block in blocks(page):
            if "nvfp4.convert(" in block:
                continue  # it needs a checkpoint: crates/python/tests/test_docs.py
            if "torchao" in block:
                continue  # it needs torchao: test_torchao.py
            if "nvfp4.transformers" in block:
                continue  # it needs two checkpoints: below
            if "nvfp4.te.install()" in block:
                continue  # it is for a whole process: test_te_standin.py
            names = {}
            exec(compile(block, page, "exec"), names)
            if page == "README.md":
                assert names["y"].shape == (32, 48)
            run += 1
    assert run == 11


def test_the_example_of_transformers_runs(tmp_path, monkeypatch):
    """On a small model under the name of a large one."""
    import nvfp4
    from test_transformers import made

    monkeypatch.chdir(tmp_path)
    made("qwen3").save_pretrained("Qwen3-8B")
    words = {word: number for number, word in enumerate("<unk> <s> </s> The capital of France is".split())}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}  # fmt: skip
    (tmp_path / "Qwen3-8B/tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "Qwen3-8B/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    nvfp4.convert("Qwen3-8B", "Qwen3-8B-NVFP4")
    (block,) = (block for block in blocks("docs/python.md") if "nvfp4.transformers" in block)
    names = {}
    exec(compile(block, "docs/python.md", "exec"), names)
    assert names["text"].startswith("The capital of France is") and (tmp_path / "stats.safetensors").is_file()


def test_the_example_fine_tunes():
    program = [sys.executable, str(ROOT / "examples/python/finetune.py"), "--steps", "4"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "bf16" in done.stdout and "mean of the last" in done.stdout


def test_the_example_trains_under_every_recipe():
    """The script fails if a loss is not finite or does not fall."""
    program = [sys.executable, str(ROOT / "examples/python/te_recipes.py"), "--device", "cpu"]
    small = ["--steps", "3", "--layers", "2"]
    done = subprocess.run(program + small, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 13 and all("→" in line for line in lines)
    for name in ("Delayed", "Float8Current", "MXFP8Block", "Float8Block", "NVFP4Block", "Custom"):
        assert any(name in line for line in lines), name

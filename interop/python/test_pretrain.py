"""examples/python/pretrain.py on the CPU: one worker and two, and from one number to another."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import safe_open

PROGRAM = str(Path(__file__).parents[2] / "examples/python/pretrain.py")
ENDS = str(Path(__file__).with_name("workers.py"))
SIZES = "--layers 1 --width 64 --heads 4 --kv-heads 2 --context 32 --batch 4 --evaluate-every 2"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(4):
        (folder / f"{i}.txt").write_text("A quick brown fox jumps over the lazy dog. " * 100)
    return folder


def command(text, out, words):
    words = [*SIZES.split(), "--device", "cpu", "--warmup", "1", *words.split()]
    return [PROGRAM, "--text", str(text), "--out", str(out), *words]


def pretrain(text, out, words, workers=1):
    # A gloo thread may abort a process that ends as Python does.
    start = [sys.executable, ENDS]
    if workers > 1:
        start[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [*start, *command(text, out, words)]
    return subprocess.run(program, capture_output=True, text=True, env=environment)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines], lines


def test_two_workers_go_on_where_one_stopped(text, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = "--recipe nvfp4_row_scaled"
    for out, words, workers in [
        (whole, "--steps 4 --save-every 2", 1),
        (parts, "--steps 4 --save-every 2 --agree", 2),
        (parts, "--steps 6 --resume", 1),
        (whole, "--steps 6 --resume --agree", 2),
    ]:
        done = pretrain(text, out, f"{recipe} --schedule constant {words}", workers)
        assert done.returncode == 0, done.stderr
    (one, lines), (two, _) = losses(whole), losses(parts)
    # Stochastic rounding draws other numbers in other workers.
    assert one == pytest.approx(two, rel=2e-2) and one[-1] < one[0]
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    # Each token has a scale of its own, and one block of four or more that it is made for.
    assert all(1 / 16 <= line["saturated"] < 1 and line["lost"] == 0 for line in lines)
    assert done.stdout.count("% of blocks saturated") == 2  # a line for each step
    last = lines[-1]
    assert last["held_out"] > 0
    assert last["tokens"] == 6 * 4 * 32 and last["recipe"] == "nvfp4_row_scaled"


def test_workers_that_split_layers_or_batches_learn_the_same(text, tmp_path):
    for out, words, workers in [
        (tmp_path / "one", "", 1),
        (tmp_path / "two", "--tensor-parallel 2", 2),
        (tmp_path / "four", "--tensor-parallel 2 --sequence-parallel --agree", 4),
        (tmp_path / "ddp", "--data-parallel ddp --agree", 2),
    ]:
        done = pretrain(text, out, f"--recipe nvfp4 --steps 2 {words}", workers)
        assert done.returncode == 0, done.stderr
    (one, (first, *_)), *others = (losses(tmp_path / name) for name in ("one", "two", "four", "ddp"))
    for other, lines in others:
        assert other[0] == pytest.approx(one[0], rel=1e-4) and other == pytest.approx(one, rel=2e-2)
        assert lines[0]["norm"] == pytest.approx(first["norm"], rel=5e-2)


def test_compiled_steps_learn_the_same_and_keep_what_is_asked_for(text, tmp_path):
    words = "--recipe nvfp4_row_scaled --steps 2 --save-every 0 --blocks-every 2"
    for out, more in [(tmp_path / "eager", ""), (tmp_path / "compiled", " --compile")]:
        done = pretrain(text, out, words + more)
        assert done.returncode == 0, done.stderr
        assert not (out / "checkpoints").exists() and (out / "model.safetensors").exists()
    (eager, _), (compiled, lines) = losses(tmp_path / "eager"), losses(tmp_path / "compiled")
    # A compiled gate is rounded to bf16 once, not twice.
    assert compiled == pytest.approx(eager, rel=2**-8)
    assert ["saturated" in line for line in lines] == [False, True]


def test_the_result_is_a_folder_of_hugging_face(text, tmp_path):
    done = pretrain(text, tmp_path / "model", "--steps 1")
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "model/loss.svg").read_text()
    config = json.loads((tmp_path / "model/config.json").read_text())
    tokens = json.loads((tmp_path / "model/tokenizer.json").read_text(encoding="utf-8"))
    assert sorted(tokens["model"]["vocab"].values()) == list(range(256))
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [32, 64]
    assert shapes["lm_head.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert len(shapes) == 3 + 9 * config["num_hidden_layers"]


@pytest.mark.parametrize(
    "words, error",
    [
        ("--heads 5", "--width must be a multiple of --heads"),
        ("--tensor-parallel 2", "1 workers are no multiple of --tensor-parallel 2"),
        ("--sequence-parallel", "--sequence-parallel needs --tensor-parallel"),
        ("--blocks-every 0", "--blocks-every must be 1 or more"),
        ("--text nowhere", "there is no nowhere"),
    ],
)
def test_wrong_settings_are_named(text, tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.syspath_prepend(str(Path(PROGRAM).parent))
    monkeypatch.setattr(sys, "argv", command(text, tmp_path, words))
    try:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module("pretrain").main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert ended.value.code == 2 and error in capsys.readouterr().err

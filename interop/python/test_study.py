"""examples/python/study.py on the CPU, with a model that learns nothing in two steps."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/python"))
import study  # noqa: E402

COMMIT = "0" * 40  # a source archive has none
SMALL = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --steps 2 --warmup 1 --device cpu".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(2):
        (folder / f"{i}.txt").write_text("A quick brown fox jumps over the lazy dog. " * 100)
    return folder


def run(text, results, *words):
    study.main(["run", "--text", str(text), "--results", str(results), "--commit", COMMIT, *SMALL, *words])


def test_runs_are_made_once_and_summed_up(text, tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    run(text, results, "--only", "bf16", "nvfp4-last-two-bf16", "--seeds", "0")
    first = {path.name: path.read_bytes() for path in results.glob("*.json")}
    assert sorted(first) == ["bf16-0.json", "nvfp4-last-two-bf16-0.json"]
    run(text, results, "--only", "bf16", "nvfp4", "--seeds", "0")
    again = {path.name: path.read_bytes() for path in results.glob("*.json")}
    assert {name: again[name] for name in first} == first and set(again) - set(first) == {"nvfp4-0.json"}

    made = {name: json.loads(text) for name, text in again.items()}
    one, other = made["nvfp4-0.json"], made["bf16-0.json"]
    assert one["seed"] == 0 and one["machine"]["torch"] and one["commit"] == COMMIT
    assert one["rules"] == "nvfp4" and other["rules"] is None and one["text"] == other["text"]
    # Both blocks stay in bf16, so nothing is quantized: the same weights, batches and losses.
    plain = made["nvfp4-last-two-bf16-0.json"]
    assert plain["held_out"] == other["held_out"] and plain["training"] == other["training"]
    assert one["held_out"] != other["held_out"] and [tokens for tokens, _ in one["held_out"]] == [32, 64]

    capsys.readouterr()
    study.main(["table", "--results", str(results)])
    lines = capsys.readouterr().out.splitlines()
    gap = one["held_out"][-1][1] / other["held_out"][-1][1] - 1
    assert lines[2].startswith("| `bf16` | 1 |") and lines[2].endswith("| – | – |")
    assert f"| {gap:+.2%}".replace("%", " %") in lines[3] and "+0.00 %" in lines[4]

    monkeypatch.setattr(study, "TIMED", 1)
    words = ["--results", str(results), "--commit", COMMIT, "--only", "bf16", "nvfp4"]
    study.main(["speed", "--text", str(text), "--rounds", "2", *words, *SMALL])
    speed = json.loads((results / "speed.json").read_text())
    assert {name: len(rates) for name, rates in speed["tokens_a_second"].items()} == {"bf16": 2, "nvfp4": 2}
    capsys.readouterr()
    study.main(["table", "--results", str(results)])
    lines = capsys.readouterr().out.splitlines()
    assert "(1.00) |" in lines[2] and lines[4].endswith("| – |")
    words[-2:] = ["mxfp8"]  # beside what is there
    study.main(["speed", "--text", str(text), "--rounds", "1", *words, *SMALL])
    again = json.loads((results / "speed.json").read_text())["tokens_a_second"]
    assert len(again.pop("mxfp8")) == 1 and again == speed["tokens_a_second"]
    words[words.index(COMMIT)] = "1" * 40
    with pytest.raises(SystemExit, match="speed.json is of another commit, machine or settings: take a new folder"):
        study.main(["speed", "--text", str(text), *words, *SMALL])


def test_a_run_does_not_depend_on_those_before_it(text, tmp_path):
    run(text, tmp_path / "alone", "--only", "nvfp4", "--seeds", "1")
    run(text, tmp_path / "after", "--only", "nvfp4_4over6", "nvfp4", "--seeds", "1")
    alone, after = (json.loads((tmp_path / name / "nvfp4-1.json").read_text()) for name in ("alone", "after"))
    assert alone["training"] == after["training"] and alone["held_out"] == after["held_out"]
    assert alone["command"] == after["command"]


def test_what_does_not_go_together_is_refused(text, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    settings = {**study.SETTINGS, "steps": 3}
    (results / "bf16-0.json").write_text(json.dumps({"recipe": "bf16", "seed": 0, "settings": settings, "text": {}}))
    with pytest.raises(SystemExit, match="other settings or text: take a new folder"):
        run(text, results)
    (results / "nvfp4-0.json").write_text(json.dumps({"recipe": "nvfp4", "seed": 0, "settings": study.SETTINGS, "text": {}}))
    with pytest.raises(SystemExit, match="nvfp4 with seed 0 has other settings than bf16 with seed 0"):
        study.main(["table", "--results", str(results)])
    with pytest.raises(SystemExit, match="no runs yet"):
        study.main(["table", "--results", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit):
        run(text, results, "--only", "nvfp5")
    assert "there is no nvfp5; there are bf16, nvfp4, " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="there is no nowhere"):
        study.main(["run", "--text", "nowhere", "--results", str(tmp_path / "new"), *SMALL])


def test_every_recipe_is_one():
    import nvfp4

    for name, recipe in study.recipes(8).items():
        if isinstance(recipe, Path):
            assert name in str(nvfp4.Recipe.from_file(recipe))
        elif recipe is not None:
            made = nvfp4.Recipe.from_toml(recipe) if "\n" in recipe else nvfp4.Recipe(recipe)
            assert name in str(made)

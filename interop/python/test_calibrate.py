"""Statistics of activations by hooks: those of the command, on the same tokens."""

import json
import subprocess
import sys

import pytest
import torch

import nvfp4
from test_transformers import TOKENS, made

COMMAND = [sys.executable, "-m", "nvfp4"]


def stats_of(file):
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, json.loads(opened.metadata()["nvfp4-calibration"])


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe", "mixtral"])
def test_statistics_are_those_of_the_command(tmp_path, name):
    """As far as activations in float32 are the same."""
    model = made(name)
    model.save_pretrained(tmp_path / "model")
    words = {f"w{i}": i for i in range(160)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}  # fmt: skip
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "text.txt").write_text(" ".join(f"w{token}" for token in TOKENS.flatten()))
    theirs = tmp_path / "command.safetensors"
    arguments = ["calibrate", tmp_path / "model", "--text", tmp_path / "text.txt", "--context", "24", "-q", "-o", theirs]
    subprocess.run([*COMMAND, *arguments], check=True, capture_output=True)
    nvfp4.calibrate(model, [TOKENS[:1], {"input_ids": TOKENS[1:]}], tmp_path / "hooks.safetensors")
    (expected, about), (found, own) = stats_of(theirs), stats_of(tmp_path / "hooks.safetensors")
    assert own == {key: about[key] for key in own} == {"version": 1, "tokens": 48, "percentile": 99.9}
    # The head is a linear layer too, which the command does not reach.
    assert {key for key in found if not key.startswith("lm_head")} == set(expected)
    for key, tensor in expected.items():
        if key.endswith(".input_percentile"):  # the end of a bin, of 32 in a doubling
            assert (found[key] / tensor).log2().abs().item() < 1.5 / 32, key
        elif key.endswith(".expert_tokens"):
            assert torch.equal(found[key], tensor), key
        else:
            torch.testing.assert_close(found[key], tensor, rtol=2e-4, atol=1e-6, msg=key)
    kv, acts = ("fp8" if any("k_scale" in key for key in found) else "none"), tmp_path / "hooks.safetensors"
    nvfp4_out = subprocess.run(
        [*COMMAND, "convert", tmp_path / "model", tmp_path / "codes", "--acts", acts, "--kv", kv, "-q"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert nvfp4_out.returncode == 0, nvfp4_out.stderr
    nvfp4.convert(tmp_path / "model", tmp_path / "same", acts=acts, kv=kv)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("codes", "same")]
    assert files[0] == files[1]


def test_any_model_of_torch_is_calibrated():
    model = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    x = torch.randn(6, 40)
    found = nvfp4.calibrate(model, [x[:2], (x[2:],)], percentile=50)
    assert list(found) == sorted(f"{module}.input_{what}" for module in "02" for what in ("amax", "mean_square", "percentile"))
    assert found["0.input_amax"].item() == x.abs().max().item() and model.training
    torch.testing.assert_close(found["0.input_mean_square"], x.square().mean(0))
    blocks = torch.nn.functional.pad(x, (0, 8)).view(-1, 16).abs().amax(-1).sort().values
    middle = blocks[len(blocks) // 2 - 1].item()
    assert middle <= found["0.input_percentile"].item() <= middle * 2 ** (1 / 32) * 1.0001


def test_experts_that_saw_no_token_have_the_scale_of_the_others():
    model = made("qwen3-moe")
    found = nvfp4.calibrate(model, [TOKENS[:1, :1]])
    layer = "model.layers.0.mlp.experts"
    seen = {number for number in range(4) if f"{layer}.{number}.down_proj.input_percentile" in found}
    assert len(seen) == 2 and found[f"{layer}.expert_tokens"].sum() == 2
    assert len({found[f"{layer}.{number}.down_proj.input_amax"].item() for number in range(4)}) == 1


def test_wrong_use_is_an_error(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(ValueError, match="percentile: expected a number from 0 to 100, got 101"):
        nvfp4.calibrate(model, [torch.ones(1, 16)], percentile=101)
    with pytest.raises(ValueError, match="expected a name that ends in .safetensors"):
        nvfp4.calibrate(model, [torch.ones(1, 16)], tmp_path / "stats.json")
    with pytest.raises(ValueError, match="at least one batch"):
        nvfp4.calibrate(model, [])
    with pytest.raises(TypeError, match="expected tensors, dicts or tuples of arguments, got str"):
        nvfp4.calibrate(model, ["a text"])
    assert not model[0]._forward_pre_hooks

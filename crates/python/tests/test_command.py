"""The command line and conversion."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import reference

import nvfp4


def run(*words):
    return subprocess.run([sys.executable, "-m", "nvfp4", *words], capture_output=True, text=True)


def test_the_command_line_comes_with_the_package():
    assert nvfp4.__version__ in run("--version").stdout
    explained = run("recipe", "explain", "nvfp4")
    assert explained.returncode == 0 and "nvfp4(16x16)" in explained.stdout
    wrong = run("recipe", "explain", "nvfp5")
    assert wrong.returncode != 0 and "nvfp4" in wrong.stderr
    assert run("frobnicate").returncode == 2
    assert "Usage" in run("--help").stdout


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    types = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8}
    return {
        name: np.frombuffer(data[end:][slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def relative_error(original, decoded):
    """The norm of the error over the norm of the values, from sums that are rounded once."""
    x, y = original.astype(np.float64), decoded.astype(np.float64)
    return math.sqrt(math.fsum(((x - y) ** 2).ravel()) / math.fsum((x**2).ravel()))


@pytest.fixture
def checkpoint(tmp_path):
    """Part of a layer, of a family whose parts `verify` does not know by name."""
    rng = np.random.default_rng(3)
    names = [f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "gate_proj", "down_proj")]
    weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in names}
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text('{"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 1, "hidden_size": 64}')
    return folder


def test_commands_run_again_and_again_in_one_process(checkpoint, tmp_path):
    from nvfp4._nvfp4 import command

    for name in ("a", "b"):
        assert command(["nvfp4", "convert", str(checkpoint), str(tmp_path / name), "-q"]) == 0


def test_a_checkpoint_is_converted(checkpoint, tmp_path):
    done = nvfp4.convert(checkpoint, tmp_path / "out", skip=["*down_proj"])
    assert sorted(done["relative_error"]) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    source, made = read_safetensors(checkpoint / "model.safetensors"), read_safetensors(tmp_path / "out" / done["files"][0])
    for name, error in done["relative_error"].items():
        parts = [made[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")]
        expected = relative_error(source[f"{name}.weight"], reference.decode(*parts, "multiplier"))
        # Both sums have 64² positive terms, each of at most 3 roundings; added in any order in float64 a sum is within 64² + 2 roundings of the
        # exact one, their quotient within twice that, and a square root halves it. A quotient and a root round here and there: 8 more.
        assert abs(error - expected) <= (64**2 + 10) * 2**-53 * expected and error > 0
    assert done["notes"] == []
    assert done["after"] < done["before"] and (tmp_path / "out" / done["files"][0]).exists()
    with pytest.raises(ValueError, match="out"):
        nvfp4.convert(checkpoint, tmp_path / "out")
    nvfp4.convert(checkpoint, tmp_path / "out", existing="replace", to="compressed-tensors", scale="mse", acts=1.0)


def test_weights_that_are_joined_get_one_scale(checkpoint, tmp_path):
    def scales(folder, done):
        made = read_safetensors(folder / done["files"][0])
        return [made[f"model.layers.0.mlp.{name}.weight_scale_2"].tolist() for name in ("gate_proj", "up_proj")]

    with pytest.raises(nvfp4.ConversionError):  # servers that join them would decode one of them wrongly
        nvfp4.convert(checkpoint, tmp_path / "apart", fuse="off")
    apart = scales(tmp_path / "apart", {"files": ["model.safetensors"]})
    assert apart[0] != apart[1]
    done = nvfp4.convert(tmp_path / "apart", tmp_path / "joined", fix_scales=True)
    assert scales(tmp_path / "joined", done) == [max(apart)] * 2


def test_bad_requests_of_a_conversion(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="compressed-tensors"):
        nvfp4.convert(checkpoint, tmp_path / "out", to="onnx")
    with pytest.raises(ValueError, match="'4over6'"):
        nvfp4.convert(checkpoint, tmp_path / "out", scale="best")
    with pytest.raises(OSError, match="nowhere"):
        nvfp4.convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(TypeError, match="dict of module names"):
        nvfp4.convert(checkpoint, tmp_path / "out", acts="all")
    for setting, word in (("kv", "int8"), ("from_", "onnx"), ("fuse", "some"), ("device", "gpu")):
        with pytest.raises(ValueError, match=f"unknown {setting} '{word}'"):
            nvfp4.convert(checkpoint, tmp_path / "out", **{setting: word})
    with pytest.raises(ValueError, match="kv='fp8' takes the scales that nvfp4.calibrate finds"):
        nvfp4.convert(checkpoint, tmp_path / "out", kv="fp8", acts=1.0)
    with pytest.raises(OSError, match="nowhere.safetensors"):
        nvfp4.convert(checkpoint, tmp_path / "out", acts=tmp_path / "nowhere.safetensors")
    with pytest.raises(TypeError, match="fuse"):
        nvfp4.convert(checkpoint, tmp_path / "out", fuse=3)
    assert not (tmp_path / "out").exists()
    nvfp4.convert(checkpoint, tmp_path / "out")
    with pytest.raises(ValueError, match=r"already exists.*\[existing='replace'\]"):
        nvfp4.convert(checkpoint, tmp_path / "out")


def test_what_a_conversion_wrote_is_checked_as_the_command_line_checks_it(checkpoint, tmp_path):
    with pytest.raises(nvfp4.ConversionError, match="gate/up") as raised:
        nvfp4.convert(checkpoint, tmp_path / "out", fuse="off")
    assert isinstance(raised.value, ValueError) and len(raised.value.problems) == 1
    assert (tmp_path / "out").exists() and nvfp4.verify(tmp_path / "out") == raised.value.problems
    done = run("verify", str(tmp_path / "out"), "--json")
    found = [f"{f['about']}: {f['text']}" for f in json.loads(done.stdout)["findings"] if f["severity"] == "problem"]
    assert done.returncode == 1 and len(found) == 1 and raised.value.problems[0].startswith(found[0])
    assert "[fix: nvfp4.convert(..., to='modelopt', fix_scales=True)]" in raised.value.problems[0]
    assert nvfp4.verify(checkpoint) != [] and "not NVFP4" in nvfp4.verify(checkpoint)[0]
    with pytest.raises(ValueError, match="vllm"):
        nvfp4.verify(checkpoint, client="onnx")
    with pytest.raises(OSError, match="nowhere"):
        nvfp4.verify(tmp_path / "nowhere")


def test_the_settings_of_a_conversion_are_those_of_the_command_line(checkpoint, tmp_path):
    told = []
    settings = {
        "fuse": [["gate_proj", "up_proj"]], "kv": "fp8-cast", "from_": "plain", "no_default_skips": True,
        "device": "cpu", "keep_shards": True, "acts": 1.0,
    }  # fmt: skip
    nvfp4.convert(checkpoint, tmp_path / "ours", progress=lambda *at: told.append(at), **settings)
    (tmp_path / "fuse.json").write_text(json.dumps(settings["fuse"]))
    done = run(
        "convert", str(checkpoint), str(tmp_path / "theirs"), "--fuse", str(tmp_path / "fuse.json"), "--kv", "fp8-cast",
        "--from", "plain", "--no-default-skips", "--keep-shards", "--acts", "const", "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for ours in (tmp_path / "ours").iterdir():
        assert ours.read_bytes() == (tmp_path / "theirs" / ours.name).read_bytes(), ours.name
    weights = 3 * 64 * 64 * 4
    assert told[-1] == ("write", weights, weights) and {at[0] for at in told} <= {"amax", "write"}


def test_what_progress_raises_stops_a_conversion(checkpoint, tmp_path):
    def progress(*at):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        nvfp4.convert(checkpoint, tmp_path / "out", progress=progress)


TWICE = """
import sys
from nvfp4._nvfp4 import command

source, target = sys.argv[1:]
for number in "12":
    assert command(["nvfp4", "convert", source, target + number]) == 0
print("both are done")
"""

TRAIN = """
import sys
from nvfp4._nvfp4 import command

print("it begins", flush=True)
small = "--steps 1 --layers 1 --width 32 --heads 2 --context 16 --batch 1 --recipe bf16 --text".split()
status = command(["nvfp4", "train", *small, sys.argv[1]])
print("it ends with", status, flush=True)
"""


def test_a_process_converts_twice(checkpoint, tmp_path):
    done = subprocess.run([sys.executable, "-c", TWICE, str(checkpoint), str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("both are done\n") and (tmp_path / "out1").exists() and (tmp_path / "out2").exists()


def test_training_leaves_the_process_that_asked_for_it_alone(tmp_path):
    (tmp_path / "text").write_text("All work and no play makes Jack a dull boy. " * 200)
    done = subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / "text")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("it begins") == 1 and lines[-1] == "it ends with 0"

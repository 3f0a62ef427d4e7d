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
    rng = np.random.default_rng(3)
    names = [f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "gate_proj", "down_proj")]
    weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in names}
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}')
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
    assert done["findings"] == []
    assert done["after"] < done["before"] and (tmp_path / "out" / done["files"][0]).exists()
    with pytest.raises(ValueError, match="out"):
        nvfp4.convert(checkpoint, tmp_path / "out")
    nvfp4.convert(checkpoint, tmp_path / "out", existing="replace", to="compressed-tensors", scale="mse", acts=1.0)


def test_weights_that_are_joined_get_one_scale(checkpoint, tmp_path):
    def scales(folder, done):
        made = read_safetensors(folder / done["files"][0])
        return [made[f"model.layers.0.mlp.{name}.weight_scale_2"].tolist() for name in ("gate_proj", "up_proj")]

    done = nvfp4.convert(checkpoint, tmp_path / "apart", fuse="off")
    apart = scales(tmp_path / "apart", done)
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

"""The command line and conversion."""

import json
import subprocess
import sys

import numpy as np
import pytest

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


def test_a_checkpoint_is_converted(checkpoint, tmp_path):
    done = nvfp4.convert(checkpoint, tmp_path / "out", skip=["*down_proj"])
    assert sorted(done["relative_error"]) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert all(0 < error < 0.15 for error in done["relative_error"].values())
    assert done["after"] < done["before"] and (tmp_path / "out" / done["files"][0]).exists()
    with pytest.raises(ValueError, match="out"):
        nvfp4.convert(checkpoint, tmp_path / "out")
    nvfp4.convert(checkpoint, tmp_path / "out", existing="replace", to="compressed-tensors", scale="mse", acts=1.0)


def test_bad_requests_of_a_conversion(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="compressed-tensors"):
        nvfp4.convert(checkpoint, tmp_path / "out", to="onnx")
    with pytest.raises(ValueError, match="'4over6'"):
        nvfp4.convert(checkpoint, tmp_path / "out", scale="best")
    with pytest.raises(OSError, match="nowhere"):
        nvfp4.convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(TypeError, match="dict of module names"):
        nvfp4.convert(checkpoint, tmp_path / "out", acts="all")

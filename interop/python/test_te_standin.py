"""``import transformer_engine`` finds this package, and says what is not there.

Each test is a program of its own: what stands in, stands in for the whole of one.
"""

import pathlib
import re
import subprocess
import sys


def run(program, *arguments):
    """What a program prints, and what it says aside."""
    done = subprocess.run(
        [sys.executable, *arguments, *(() if program is None else ("-c", program))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_modules_have_the_names_of_transformer_engine():
    _, aside = run("""
import importlib.metadata, importlib.util, nvfp4.te
nvfp4.te.install()
nvfp4.te.install()
import torch, transformer_engine, transformer_engine.pytorch as te, transformer_engine_torch as tex
from transformer_engine.common import recipe
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
assert te.Linear is nvfp4.te.Linear and NVFP4Quantizer is te.NVFP4Quantizer
assert te.quantization.FP8GlobalStateManager is FP8GlobalStateManager
assert TE_DType[torch.bfloat16] == tex.DType.kBFloat16 == te.DType.kBFloat16
for name in ("transformer_engine", "transformer-engine", "transformer_engine_torch"):
    assert importlib.metadata.version(name) == transformer_engine.__version__
assert importlib.util.find_spec("transformer_engine.pytorch.module")
assert importlib.util.find_spec("transformer_engine.jax") is None
layer = te.Linear(64, 64)
assert isinstance(layer, TransformerEngineBaseModule)
assert not FP8GlobalStateManager.is_fp8_enabled()
assert te.utils.get_cudnn_version is te.get_cudnn_version and len(te.get_cudnn_version()) == 3
asked = recipe.NVFP4BlockScaling()
with te.autocast(recipe=asked):
    layer(torch.ones(32, 64))
    assert FP8GlobalStateManager.get_fp8_recipe() is asked
""")
    assert aside.count("nvfp4.te stands in for transformer_engine") == 1


def test_what_is_not_there_names_what_stands_in():
    cases = [
        ("te.nothing", "AttributeError transformer_engine.pytorch, for which nvfp4.te stands in, has no 'nothing'"),
        ("te.onnx_export", "has no 'onnx_export' (nvfp4.te has no 'onnx_export': use torch.export"),
        ("te._recipe", "has no '_recipe'"),
        ("te.initialize_ub", "nvfp4.te has no 'initialize_ub': there are no user buffers"),
        ("from transformer_engine.pytorch.module.base import destroy_ub", "ImportError"),
        ("import transformer_engine.debug", "nothing for 'transformer_engine.debug': its debug tools are not here"),
        ("from transformer_engine.debug.pytorch import debug_state", "'transformer_engine.debug': its debug tools"),
        ("from transformer_engine.pytorch.export import onnx_export", "nothing for 'transformer_engine.pytorch.export': use"),
        ("import transformer_engine.debugger", "ModuleNotFoundError No module named 'transformer_engine.debugger'"),
        ("from transformer_engine.pytorch.utils import _nothing", "nvfp4/te/standin/"),
        ("import transformer_engine.pytorch.nothing", "ModuleNotFoundError nvfp4.te stands in for transformer_engine"),
    ]  # fmt: skip
    out, _ = run(f"""
import nvfp4.te
nvfp4.te.install()
import transformer_engine.pytorch as te
for line in {[line for line, _ in cases]}:
    try:
        exec(line)
    except Exception as error:
        print(type(error).__name__, error)
""")
    said = out.splitlines()
    assert len(said) == len(cases)
    for (_, expected), found in zip(cases, said):
        assert expected in found


def test_the_real_package_is_not_mixed_with_it():
    out, _ = run("""
import sys, types, nvfp4.te
sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
try:
    nvfp4.te.install()
except RuntimeError as error:
    print(error)
""")
    assert "transformer_engine is imported already: call nvfp4.te.install() before" in out


def test_the_example_of_the_guide_runs():
    guide = pathlib.Path(__file__).parents[2] / "docs" / "transformer-engine.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "install()" in block]
    run(example)


def test_the_layer_of_megatron_trains():
    script = pathlib.Path(__file__).parents[2] / "examples" / "python" / "te_megatron.py"
    out, _ = run(None, "-m", "nvfp4.te", str(script), "--steps", "8")
    first, last = (float(line.split()[-1]) for line in out.splitlines()[1:])
    assert last < first / 2


def test_programs_run_as_they_are(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, beside\nimport transformer_engine.pytorch as te\n"
        "print(__name__, sys.argv[1:], te.Linear.__module__)\n"
    )
    (tmp_path / "beside.py").write_text("")
    expected = "__main__ ['--a', 'b'] nvfp4.te._linear\n"
    assert run(None, "-m", "nvfp4.te", str(script), "--a", "b")[0] == expected
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4.te", "-m", "train", "--a", "b"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert done.stdout == expected

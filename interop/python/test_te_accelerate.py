"""Hugging Face Accelerate trains in FP8 by its way through TransformerEngine, for which ``nvfp4.te``
stands in.
"""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "python" / "te_accelerate.py"


@pytest.mark.parametrize("more", [(), ("--mxfp8",)], ids=["delayed", "mxfp8"])
def test_the_example_trains(more):
    program = [sys.executable, "-m", "nvfp4.te", str(SCRIPT), "--steps", "20", *more]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Accelerate has replaced the layers of torch.
    assert "nvfp4.te._linear.Linear" in lines and "nvfp4.te._norms.LayerNorm" in lines
    assert not any("torch.nn" in line and "Linear" in line for line in lines)
    first, last = (float(line.split()[-1]) for line in lines if line.startswith("step "))
    assert last < first / 2

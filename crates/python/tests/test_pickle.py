"""Tensors and quantizers that are copied, pickled, and sent to other processes."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import nvfp4

X = np.random.default_rng(6).standard_normal((3, 16, 64)).astype(np.float32)
SPECS = [
    "nvfp4(hadamard)", "nvfp4(row-scaled)", "nvfp4(swizzled)", "mxfp8", "fp8", "fp8-block(128x128)", "high-precision",
    "mxfp8 / nvfp4(hadamard)", "mxfp8 / high-precision from row",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_tensor_is_the_same_tensor(spec, protocol):
    for directions in ("row", "column", "both"):
        q = nvfp4.Quantizer(spec=spec, directions=directions).quantize(X)
        again = pickle.loads(pickle.dumps(q, protocol))
        assert again == q and again.shape == q.shape and repr(again) == repr(q)
        assert nvfp4.QuantTensor.from_bytes(q.to_bytes()) == q


@pytest.mark.parametrize("profile", ["modelopt", "llm-compressor", "torchao"])
def test_other_profiles_stay_what_they_are(profile):
    q = nvfp4.quantize(X, profile=profile)
    again = pickle.loads(pickle.dumps(q))
    assert again == q and again.row.unit == q.row.unit


@pytest.mark.parametrize("spec", SPECS)
def test_a_deep_copy_has_memory_of_its_own(spec):
    q = nvfp4.Quantizer(spec=spec, directions="both").quantize(X)
    again = copy.deepcopy({"weights": [q]})["weights"][0]
    assert again == q
    ours, theirs = ({a.ctypes.data for d in (t.row, t.column) for a in d.parts} for t in (q, again))
    assert not ours & theirs
    assert {a.ctypes.data for a in copy.copy(q).row.parts} == {a.ctypes.data for a in q.row.parts}


def double(q):
    return q, nvfp4.matmul(q, q)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_tensors_go_to_other_processes_and_back(method):
    q = nvfp4.quantize(X)
    with multiprocessing.get_context(method).Pool(1) as pool:
        again, product = pool.apply(double, (q,))
    assert again == q and (product == nvfp4.matmul(q, q)).all()


def test_quantizers_and_recipes():
    quantizer = nvfp4.Quantizer(tile="16x16", profile="modelopt", finite="refuse", directions="both")
    assert pickle.loads(pickle.dumps(quantizer)) == quantizer and copy.deepcopy(quantizer) == quantizer
    recipe = nvfp4.Recipe.from_function("plain", lambda role: "high-precision")
    assert copy.deepcopy(recipe) is recipe


def test_bytes_that_are_no_tensor():
    whole = nvfp4.quantize(X).to_bytes()
    for data in (b"", b"text", whole[:-1], whole[:100], whole.replace(b"nvfp4", b"nvfp5")):
        with pytest.raises(ValueError, match="the bytes of a tensor"):
            nvfp4.QuantTensor.from_bytes(data)

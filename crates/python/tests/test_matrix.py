"""1,296 cases, bit for bit: types × shapes × inputs × scopes × scale rules, as FlashInfer tests its quantizer against TransformerEngine."""

import ml_dtypes
import numpy as np
import pytest
import reference

import nvfp4

SHAPES = [(1, 64), (1, 1024), (3, 128), (16, 64), (64, 128), (128, 64), (256, 128), (512, 256), (128, 1024)]
RULES = ["six"] + [
    f"4over6-{metric}-{path}-{bound}" for metric in ("mae", "mse") for path in ("strict", "fast") for bound in (448, 256)
]
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def values(kind, shape, dtype):
    rng = np.random.default_rng(0)
    if kind == "random":
        x = rng.standard_normal(shape)
        x[0] = 0
    elif kind == "boundary":
        centre = np.linspace(-12, 12, shape[0] * shape[1])
        x = (centre + rng.choice([-1e-3, 0, 1e-3], centre.shape)).reshape(shape)
    elif kind == "zeros":
        x = np.zeros(shape)
    else:
        return np.full(shape, ml_dtypes.finfo(dtype).max, dtype)
    return x.astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxima"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_the_references(dtype, kind, shape):
    x = values(kind, shape, DTYPES[dtype])
    for scope in ("per-tensor", "row-scaled"):
        for rule in RULES:
            codes, scales, amax = reference.quantize(x, scope, rule)
            q = nvfp4.quantize(x, global_scale=scope, scale_rule=rule)
            assert (q.codes == codes).all(), (scope, rule)
            assert (q.scales == scales).all(), (scope, rule)
            assert (q.amax == amax).all(), (scope, rule)


def test_the_matrix_has_1296_cases():
    assert len(DTYPES) * len(SHAPES) * 4 * 2 * len(RULES) == 1296


@pytest.mark.parametrize("shape", [(128, 16384), (1024, 2048)], ids=str)
def test_large_matrices_too(shape):
    x = values("random", shape, ml_dtypes.bfloat16)
    codes, scales, _ = reference.quantize(x, "row-scaled", "4over6-mse-strict-256")
    q = nvfp4.quantize(x, global_scale="row-scaled", scale_rule="4over6-mse-strict-256")
    assert (q.codes == codes).all() and (q.scales == scales).all()

"""Products."""

import ml_dtypes
import numpy as np
import pytest

import nvfp4


@pytest.fixture
def operands():
    rng = np.random.default_rng(2)
    return rng.standard_normal((32, 64)).astype(np.float32), rng.standard_normal((48, 64)).astype(np.float32)


def test_nvfp4_products_are_rounded_once(operands):
    a, b = map(nvfp4.quantize, operands)
    # Codes times block scales are exact in binary64, and so is their sum here; the global scales come after one rounding.
    exact = lambda q: q.dequantize().astype(np.float64) / (q.amax.astype(np.float64) / 2688)  # noqa: E731
    acc = (exact(a).round(12) @ exact(b).round(12).T).astype(np.float32)
    alpha = (a.amax * b.amax) / np.float32(2688.0 * 2688.0)
    assert np.allclose(nvfp4.matmul(a, b), acc * alpha, rtol=2**-21, atol=1e-6)


def test_the_three_products_of_a_linear_layer(operands):
    x, w = (nvfp4.quantize(v, directions="both") for v in operands)
    dy = nvfp4.quantize(np.ones((32, 48), np.float32), directions="both")
    assert nvfp4.matmul(x, w).shape == (32, 48)
    assert nvfp4.matmul(dy, w.column).shape == (32, 64)
    assert nvfp4.matmul(dy.column, x.column).shape == (48, 64)


def test_plain_activations_and_their_shape(operands):
    x, w = operands
    q = nvfp4.quantize(w)
    y = nvfp4.matmul(x.reshape(4, 8, 64), q)
    assert y.shape == (4, 8, 48)
    assert np.abs(y.reshape(32, 48) - x @ q.dequantize().T).max() < 1e-4


def test_bias_factors_and_an_added_matrix(operands):
    a, b = map(nvfp4.quantize, operands)
    bias, c = np.arange(48, dtype=np.float32), np.ones((32, 48), np.float32)
    plain = nvfp4.matmul(a, b)
    assert (nvfp4.matmul(a, b, bias=bias) == plain + bias).all()
    assert (nvfp4.matmul(a, b, alpha=2.0) == 2 * plain).all()
    assert (nvfp4.matmul(a, b, c=c, beta=3.0) == plain + 3).all()
    assert (a.matmul(b, bias=bias) == plain + bias).all()


def test_results_in_other_types(operands):
    a, b = map(nvfp4.quantize, operands)
    y = nvfp4.matmul(a, b)
    assert (nvfp4.matmul(a, b, dtype="bfloat16") == y.astype(ml_dtypes.bfloat16)).all()
    assert (nvfp4.matmul(a, b, dtype=np.float16) == y.astype(np.float16)).all()


def test_rotations_cancel_only_if_they_are_equal(operands):
    x, _ = operands
    turned = nvfp4.quantize(x, directions="column", transform="hadamard").column
    straight = nvfp4.quantize(x, directions="column").column
    exact = x.T @ x
    assert np.abs(nvfp4.matmul(turned, turned) - exact).max() < 0.2 * np.abs(exact).max()
    with pytest.raises(ValueError, match="Hadamard"):
        nvfp4.matmul(turned, straight)


def test_operands_that_do_not_fit_are_refused(operands):
    a, b = map(nvfp4.quantize, operands)
    with pytest.raises(ValueError, match="K"):
        nvfp4.matmul(a, nvfp4.quantize(np.ones((4, 32), np.float32)))
    with pytest.raises(TypeError, match="quantize it"):
        nvfp4.matmul(a, operands[1])
    with pytest.raises(ValueError, match="mxfp8"):
        nvfp4.matmul(a, nvfp4.Quantizer(spec="mxfp8").quantize(operands[1]))

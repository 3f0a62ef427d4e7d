"""Products."""

import ml_dtypes
import numpy as np
import pytest
import reference

import nvfp4


@pytest.fixture
def operands():
    rng = np.random.default_rng(2)
    return rng.standard_normal((32, 64)).astype(np.float32), rng.standard_normal((48, 64)).astype(np.float32)


def test_nvfp4_products_are_rounded_once(operands):
    a, b = map(nvfp4.quantize, operands)
    assert nvfp4.matmul(a, b).tobytes() == reference.product(a.row, b.row).tobytes()


def test_the_three_products_of_a_linear_layer(operands):
    x, w = (nvfp4.quantize(v, directions="both") for v in operands)
    dy = nvfp4.quantize(np.random.default_rng(3).standard_normal((32, 48)).astype(np.float32), directions="both")
    for a, b, shape in ((x.row, w.row, (32, 48)), (dy.row, w.column, (32, 64)), (dy.column, x.column, (48, 64))):
        y = nvfp4.matmul(a, b)
        assert y.shape == shape and y.tobytes() == reference.product(a, b).tobytes()


def codes_of_six(rng, shape):
    """Numbers that are E2M1 codes where a block's scale is 1, which it is with a 6 in each block and an amax of 2688."""
    x = reference.e2m1_value(rng.integers(0, 16, shape).astype(np.uint8))
    x[:, ::16] = 6
    return x


def test_plain_activations_and_their_shape(operands):
    x, w = operands
    q = nvfp4.quantize(w)
    y = nvfp4.matmul(x.reshape(4, 8, 64), q)
    assert y.shape == (4, 8, 48)
    assert reference.within(y.reshape(32, 48), x, q.row).all()
    # Small integers times multiples of a half: 64 of them add up exactly in float32, in any order.
    rng = np.random.default_rng(4)
    x, w = rng.integers(-8, 9, (32, 64)).astype(np.float32), codes_of_six(rng, (48, 64))
    assert (nvfp4.matmul(x, nvfp4.quantize(w, amax=2688.0)) == x @ w.T).all()


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
    assert nvfp4.matmul(turned, turned).tobytes() == reference.product(turned, turned).tobytes()
    with pytest.raises(ValueError, match="Hadamard"):
        nvfp4.matmul(turned, straight)


def test_rotations_cancel_without_a_trace():
    # What the transform makes of x are codes, so that nothing is lost: the product is then that of x itself, whose elements are multiples
    # of 1/8 up to 24, and so exact in float32.
    rotated = codes_of_six(np.random.default_rng(5), (64, 32))
    x = inverse_hadamard(rotated).T.astype(np.float32)
    assert (reference.hadamard(x.T) == rotated).all()
    q = nvfp4.quantize(x, directions="column", transform="hadamard", column_amax=2688.0).column
    assert (q.dequantize() == rotated).all()
    assert (nvfp4.matmul(q, q) == x.T @ x).all()


def inverse_hadamard(y):
    """The transform is orthogonal: its inverse is its transposed matrix."""
    matrix = reference.hadamard(np.eye(16))
    return (y.reshape(len(y), -1, 16) @ matrix.T).reshape(y.shape)


def test_operands_that_do_not_fit_are_refused(operands):
    a, b = map(nvfp4.quantize, operands)
    with pytest.raises(ValueError, match="K"):
        nvfp4.matmul(a, nvfp4.quantize(np.ones((4, 32), np.float32)))
    with pytest.raises(TypeError, match="quantize it"):
        nvfp4.matmul(a, operands[1])
    with pytest.raises(ValueError, match="mxfp8"):
        nvfp4.matmul(a, nvfp4.Quantizer(spec="mxfp8").quantize(operands[1]))

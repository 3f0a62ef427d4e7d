"""Arrays in, arrays out."""

import threading

import ml_dtypes
import numpy as np
import pytest
import reference

import nvfp4


@pytest.fixture
def x():
    return np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)


def test_the_arrays_of_a_tensor_are_views_of_the_right_shape(x):
    q = nvfp4.quantize(x, directions="both")
    assert q.shape == (48, 64) and q.nbytes == 2 * (48 * 64 // 2 + 48 * 64 // 16 + 4)
    assert q.codes.shape == (48, 32) and q.scales.shape == (48, 4) and q.amax.tolist() == [np.abs(x).max()]
    assert q.column.codes.shape == (64, 24) and q.column.scales.shape == (64, 3)
    assert not q.codes.flags.writeable and not q.codes.flags.owndata
    assert q.codes.ctypes.data == q.row.codes.ctypes.data, "a second look is the same memory"
    assert q.dequantize().flags.writeable, "what is computed for the caller is the caller's"


def test_views_outlive_their_tensor(x):
    codes = nvfp4.quantize(x).codes
    expected, _, _ = reference.quantize(x)
    assert (codes == expected).all()


def test_the_column_direction_is_the_transposed_matrix(x):
    q = nvfp4.quantize(x, directions="column")
    codes, scales, _ = reference.quantize(np.ascontiguousarray(x.T))
    assert q.row is None and (q.column.codes == codes).all() and (q.column.scales == scales).all()


def test_swizzled_scales_are_the_same_bytes_in_tiles(x):
    q = nvfp4.quantize(x)
    expected = reference.swizzle(np.asarray(q.scales))
    assert (q.row.swizzled_scales == expected).all()
    swizzled = nvfp4.quantize(x, layout="swizzled")
    assert (swizzled.scales == expected).all() and swizzled.row.layout == "swizzled"
    assert q.with_layout("swizzled") == swizzled and swizzled.with_layout("linear") == q


@pytest.mark.parametrize("view", ["transposed", "every other", "reversed", "repeated", "three dimensions"])
def test_any_strides_give_the_bytes_of_a_contiguous_copy(x, view):
    view = {
        "transposed": x.T,
        "every other": x[::2, ::2],
        "reversed": x[::-1, ::-1],
        "repeated": np.broadcast_to(x[:1], (7, 64)),
        "three dimensions": x.reshape(3, 16, 64)[:, ::3, 16:48],
    }[view]
    q = nvfp4.quantize(view)
    assert q == nvfp4.quantize(view.copy()) and q.shape == view.shape


def test_bfloat16_and_float16_are_read_as_they_are(x):
    for dtype in (ml_dtypes.bfloat16, np.float16):
        small = x.astype(dtype)
        assert nvfp4.quantize(small) == nvfp4.quantize(small.astype(np.float32))
        assert nvfp4.quantize(small).dequantize(dtype).dtype == dtype


def test_decoding_is_codes_times_scales(x):
    q = nvfp4.quantize(x)
    assert q.dequantize().tobytes() == reference.decode(q.codes, np.asarray(q.scales), q.amax).tobytes()
    assert q.row.typed_scales.dtype == ml_dtypes.float8_e4m3fn


def test_the_same_seed_and_offset_draw_the_same(x):
    settings = dict(rounding="stochastic", directions="both")
    q = nvfp4.quantize(x, seed=3, offset=8, **settings)
    assert q == nvfp4.quantize(x, seed=3, offset=np.int64(8), **settings)
    assert q == nvfp4.quantize(x, seed=3, offset=np.array([8]), **settings)
    assert q != nvfp4.quantize(x, seed=3, offset=10, **settings)
    assert q != nvfp4.quantize(x, seed=4, offset=8, **settings)
    column = nvfp4.quantize(x, seed=3, offset=8, rounding="stochastic", directions="column")
    assert (column.column.codes == q.column.codes).all()


def test_random_bytes_have_the_published_values():
    seed, offset, block = 0x0123456789ABCDEF, 7 * 2**32 + 5, 2**32 + 3
    drawn = [bytes(reference.random_bytes(np.array([block]), seed, at)).hex() for at in (offset, offset + 1)]
    assert drawn == ["49eeff83d91d90480d58cb7c616d1830", "d4a6c4d5189137f41f2ade3c090441f9"]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_stochastic_rounding_draws_as_the_reference_does(x, dtype):
    x = np.concatenate([x, x * 1e-4]).astype(dtype)
    q = nvfp4.quantize(x, rounding="stochastic", seed=2**63 + 5, offset=2**33 + 1, directions="both")
    for direction, matrix, offset in ((q.row, x, 2**33 + 1), (q.column, np.ascontiguousarray(x.T), 2**33 + 2)):
        codes, scales, _ = reference.quantize(matrix, draw=(2**63 + 5, offset))
        assert (direction.codes == codes).all() and (direction.scales == scales).all()


def test_the_rule_of_stochastic_rounding_is_unbiased():
    # Multiples of a 256th of their step: the mean over all 256 bytes is then the number itself, to the last bit.
    y = np.concatenate([np.arange(1024) / 512, np.arange(512) / 256 + 2, np.arange(257) / 128 + 4]).astype(np.float32)
    y, r = np.concatenate([y, -y[1:]])[:, None], np.arange(256)[None]
    drawn = reference.e2m1_value(reference.e2m1_drawn(y, r)).astype(np.float64)
    assert (drawn.mean(1) == y[:, 0]).all()


def test_a_generator_hands_out_offsets_once(x):
    generator = nvfp4.Generator(5)
    a = nvfp4.quantize(x, rounding="stochastic", generator=generator)
    assert a == nvfp4.quantize(x, rounding="stochastic", seed=5, offset=0)
    assert generator.consumed == 2 and generator.draw() == (5, 2)
    assert nvfp4.Generator.from_state(generator.state).draw() == generator.draw()
    first, second = generator.split(2)
    assert first.draw() != second.draw()


def test_a_given_amax_is_taken_as_it_is(x):
    q = nvfp4.quantize(x, amax=10.0)
    assert q.amax.tolist() == [10.0] and q == nvfp4.quantize(x, amax=np.array([10], np.float32))
    rows = nvfp4.quantize(x, global_scale="row-scaled", amax=np.abs(x).max(1))
    assert rows == nvfp4.quantize(x, global_scale="row-scaled")


def test_settings_are_a_value(x):
    a = nvfp4.Quantizer(tile="16x16", scale_rule="4over6-mse-fast-256", directions="both")
    assert a.spec == "nvfp4(16x16, 4over6-mse-fast-256)" and a.directions == "both" and a.rounding == "nearest"
    assert nvfp4.Quantizer(spec=a.spec, directions="both") == a
    assert a(x) == a.quantize(x)


@pytest.mark.parametrize("profile", ["modelopt", "llm-compressor", "torchao"])
def test_other_profiles_store_what_they_store(x, profile):
    q = nvfp4.quantize(x, profile=profile)
    assert q.row.unit == ("divisor" if profile == "llm-compressor" else "multiplier")
    with pytest.raises(AttributeError, match="global_scale"):
        q.amax
    decoded = reference.decode(q.codes, np.asarray(q.scales), np.asarray(q.row.global_scale), q.row.unit)
    assert q.dequantize().tobytes() == decoded.tobytes()


FORMATS = [
    "nvfp4(hadamard)", "nvfp4(row-scaled)", "nvfp4(swizzled)", "mxfp8", "fp8", "fp8-block", "fp8-block(128x128)",
    "high-precision", "mxfp8 / nvfp4(hadamard)", "mxfp8 / high-precision from row",
]  # fmt: skip


@pytest.mark.parametrize("spec", FORMATS)
def test_a_tensor_is_put_together_from_its_parts(x, spec):
    q = nvfp4.Quantizer(spec=spec, directions="both").quantize(x)
    row, column = q.row.parts, q.column.parts
    assert nvfp4.QuantTensor.from_parts(spec, q.shape, row=row, column=column) == q
    described = [[(str(a.dtype), list(a.shape)) for a in side] for side in (row, column)]
    assert described == [list(map(tuple, side)) for side in nvfp4.layout(spec, "both", list(q.shape), "float32")]


def test_tensors_are_saved_sliced_and_compared(x, tmp_path):
    q = nvfp4.quantize(x, directions="both")
    nvfp4.save(tmp_path / "q.safetensors", {"a": q})
    assert nvfp4.load(tmp_path / "q.safetensors") == {"a": q}
    assert (q.slice_rows(16, 32).codes == q.codes[16:32]).all()
    assert q.keep("row").column is None and q != q.keep("row")


def test_threads_quantize_side_by_side(x):
    big = np.tile(x, (40, 8))
    expected, results = nvfp4.quantize(big), [None] * 8
    def work(i):
        results[i] = nvfp4.quantize(big)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(q == expected for q in results)


def test_empty_arrays_are_tensors_too():
    for shape in [(0, 32), (4, 0), (0,)]:
        q = nvfp4.quantize(np.zeros(shape, np.float32))
        assert q.shape == shape and q.dequantize().shape == shape

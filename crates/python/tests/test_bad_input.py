"""What is wrong is an exception that says what to change, and never the end of the process."""

import ctypes
import multiprocessing
import os

import ml_dtypes
import numpy as np
import pytest

import nvfp4

X = np.ones((16, 32), np.float32)

WORDS = {
    "tile": "1x16", "global_scale": "row-scaled", "scale_rule": "4over6-mae-strict-448", "rounding": "stochastic",
    "directions": "both", "specials": "reference", "profile": "torchao", "layout": "swizzled", "finite": "refuse",
    "transform": "hadamard",
}  # fmt: skip


@pytest.mark.parametrize("setting", WORDS)
def test_an_unknown_word_is_a_value_error_that_names_the_known_ones(setting):
    with pytest.raises(ValueError, match=f"unknown {setting} 'nonsense'; there are .*'{WORDS[setting]}'"):
        nvfp4.quantize(X, **{setting: "nonsense"})


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.bool_, np.complex64])
def test_a_wrong_dtype_is_a_type_error(dtype):
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16.*cast"):
        nvfp4.quantize(X.astype(dtype))


OTHERS = [np.object_, ">f4", ">f2", np.longdouble, "M8[s]", ml_dtypes.float8_e4m3fn, "S4"]


@pytest.mark.parametrize("dtype", OTHERS, ids=lambda d: str(np.dtype(d)))
def test_a_dtype_that_numpy_does_not_lend_is_a_type_error_too(dtype):
    x = np.zeros((16, 32), dtype)
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16 elements, got .*; cast the array first"):
        nvfp4.quantize(x)
    with pytest.raises(TypeError, match="cast"):
        nvfp4.matmul(X, nvfp4.quantize(X), c=x[:, :16])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_field_of_records_is_an_array_like_any_other(dtype):
    records = np.zeros((16, 32), [("flag", np.uint8), ("x", dtype)])
    records["x"] = np.arange(16 * 32).reshape(16, 32) % 7
    assert records["x"].strides[-1] % records["x"].itemsize, "its strides are no multiple of its elements"
    assert nvfp4.quantize(records["x"]) == nvfp4.quantize(records["x"].copy())


def test_a_masked_array_is_refused_wherever_an_array_is_taken():
    masked = np.ma.masked_array(X, mask=X > 0)
    q = nvfp4.quantize(X)
    codes, scales, amax = q.row.parts
    for call in (
        lambda: nvfp4.quantize(masked),
        lambda: nvfp4.matmul(masked, q),
        lambda: nvfp4.matmul(X, q, bias=np.ma.masked_array(np.ones(16, np.float32))),
        lambda: nvfp4.quantize(X, amax=np.ma.masked_array(np.ones(1, np.float32))),
        lambda: nvfp4.QuantTensor.from_parts("nvfp4", q.shape, row=[np.ma.masked_array(codes), scales, amax]),
    ):
        with pytest.raises(TypeError, match="masked array.*filled"):
            call()
    assert nvfp4.quantize(masked.filled(0.0)).amax == 0


@pytest.mark.parametrize("thing", [None, 3.0, [[1.0, 2.0]], "text", b"bytes", object()], ids=repr)
def test_what_is_no_array_is_a_type_error(thing):
    with pytest.raises(TypeError, match="expected a numpy array, a torch tensor"):
        nvfp4.quantize(thing)


def test_combinations_without_a_meaning_fail_when_they_are_built():
    with pytest.raises(ValueError, match="directions='column' or 'both'"):
        nvfp4.Quantizer(transform="hadamard")
    with pytest.raises(ValueError):
        nvfp4.Quantizer(tile="16x16", global_scale="row-scaled")
    with pytest.raises(ValueError, match="leave the others out"):
        nvfp4.Quantizer(spec="mxfp8", tile="16x16")
    with pytest.raises(TypeError, match="65535"):
        nvfp4.Quantizer(transform=1 << 16, directions="both")


def test_randomness_that_is_missing_or_left_over():
    with pytest.raises(ValueError, match="needs `seed`"):
        nvfp4.quantize(X, rounding="stochastic")
    with pytest.raises(ValueError, match="rounding is 'nearest'"):
        nvfp4.quantize(X, seed=1)
    with pytest.raises(ValueError, match="without `seed`"):
        nvfp4.quantize(X, rounding="stochastic", offset=1)
    with pytest.raises(ValueError, match="not both"):
        nvfp4.quantize(X, rounding="stochastic", seed=1, generator=nvfp4.Generator(1))
    with pytest.raises(TypeError, match="2\\*\\*64"):
        nvfp4.quantize(X, rounding="stochastic", seed=1, offset=-1)
    with pytest.raises(OverflowError):
        nvfp4.Generator(-1)


def test_amaxes_that_do_not_fit():
    for amax, message in [(-1.0, "magnitude"), (np.nan, "NaN"), (np.array([np.nan], np.float32), "NaN"), (np.ones(3, np.float32), "amax"), ("a", "float32")]:
        with pytest.raises((ValueError, TypeError), match=message):
            nvfp4.quantize(X, amax=amax)
    with pytest.raises(ValueError, match="column"):
        nvfp4.quantize(X, column_amax=1.0)


@pytest.mark.parametrize("inexact", [np.float64(0.1), np.array(0.1), np.array([0.1]), np.array([1e39]), np.array([2**24 + 1])], ids=repr)
def test_an_amax_that_would_be_rounded_unseen_is_refused(inexact):
    with pytest.raises(TypeError, match=f"expected float32, got {inexact.dtype} with .* cast the array first"):
        nvfp4.quantize(X, amax=inexact)
    with pytest.raises(TypeError, match="cast the array first"):
        nvfp4.matmul(X, nvfp4.quantize(X), bias=np.full(16, inexact))


def test_the_message_shows_both_numbers():
    with pytest.raises(TypeError, match=r"with 0\.1, which float32 does not have \(the nearest is 0\.10000000149011612\)"):
        nvfp4.quantize(X, amax=np.array([0.1]))


def test_amaxes_that_float32_has_are_taken_from_any_type():
    expected = nvfp4.quantize(X, amax=2.5)
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        for amax in (dtype(2.5), np.array(2.5, dtype), np.array([2.5], dtype)):
            assert nvfp4.quantize(X, amax=amax) == expected
    assert nvfp4.quantize(X, amax=2).amax.tolist() == [2] and nvfp4.quantize(X, amax=np.int64(2)).amax.tolist() == [2]
    # A number of Python has no precision of its own that could get lost: it means the nearest float32.
    assert nvfp4.quantize(X, amax=0.1).amax == np.float32(0.1)
    rows = [float(i + 1) for i in range(16)]
    q = nvfp4.quantize(X, amax=rows, global_scale="row-scaled")
    assert q == nvfp4.quantize(X, amax=np.array(rows), global_scale="row-scaled") and q.amax.tolist() == rows


def test_values_that_are_not_finite_are_refused_where_asked():
    x = X.copy()
    x[3, 5] = np.nan
    with pytest.raises(ValueError, match=r"\[3, 5\]"):
        nvfp4.quantize(x, finite="refuse")
    nvfp4.quantize(x)


def test_a_dlpack_capsule_is_consumed_once():
    capsule = X.__dlpack__()
    assert nvfp4.quantize(capsule) == nvfp4.quantize(X)
    with pytest.raises(ValueError, match="consumed already"):
        nvfp4.quantize(capsule)
    with pytest.raises(TypeError, match="another kind"):
        nvfp4.quantize(np.random.default_rng(0).bit_generator.capsule)


def test_a_capsule_of_another_version_is_refused_and_given_back():
    given_back = []
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(given_back.append)

    class Managed(ctypes.Structure):  # what every version begins with
        _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", type(deleter))]

    managed, name = Managed(2, 5, None, deleter), b"dltensor_versioned"
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    with pytest.raises(BufferError, match="expected DLPack 1, got version 2.5"):
        nvfp4.quantize(new(ctypes.addressof(managed), name, None))
    assert given_back == [ctypes.addressof(managed)]


class Broken:
    """Says that it speaks DLPack."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, **kwargs):
        return self.answer() if callable(self.answer) else self.answer

    def __dlpack_device__(self):
        return (1, 0)


def test_producers_that_fail_or_lie():
    def fails():
        raise RuntimeError("the memory is gone")

    with pytest.raises(RuntimeError, match="the memory is gone"):
        nvfp4.quantize(Broken(fails))
    with pytest.raises(TypeError, match="no capsule"):
        nvfp4.quantize(Broken(3))


def test_parts_that_do_not_fit():
    q = nvfp4.quantize(X)
    codes, scales, amax = q.row.parts
    for row in ([codes, scales], [codes[:-1], scales, amax], [codes, scales[:, :1], amax], [codes, scales, np.ones(2, np.float32)]):
        with pytest.raises(ValueError):
            nvfp4.QuantTensor.from_parts("nvfp4", q.shape, row=row)
    with pytest.raises(ValueError, match="row, column or both"):
        nvfp4.QuantTensor.from_parts("nvfp4", q.shape)


def test_directions_that_are_not_there():
    q = nvfp4.quantize(X)
    assert q.column is None
    with pytest.raises(ValueError, match="no column direction"):
        q.dequantize(side="column")
    with pytest.raises(ValueError, match="no column direction"):
        q.keep("both")
    with pytest.raises(AttributeError, match="no 32-bit scale"):
        nvfp4.Quantizer(spec="mxfp8").quantize(X).row.global_scale


def test_files_that_are_not_there_or_not_ours(tmp_path):
    with pytest.raises(OSError, match="nothing.safetensors"):
        nvfp4.load(tmp_path / "nothing.safetensors")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x10" + b"\0" * 7 + b"not a header....")
    with pytest.raises(ValueError, match="bad.safetensors"):
        nvfp4.load(bad)


def _child(queue):
    queue.put(bytes(nvfp4.quantize(np.tile(X, (64, 64))).codes))


def test_a_forked_process_has_threads_of_its_own():
    expected = bytes(nvfp4.quantize(np.tile(X, (64, 64))).codes)  # the parent's threads are running by now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert child.exitcode == 0 and os.getpid() != child.pid


def test_arrays_that_are_read_only_are_read():
    amax = np.frombuffer(np.float32(2.0).tobytes(), dtype=np.float32)
    assert not amax.flags.writeable
    assert nvfp4.quantize(np.ones((16, 16), np.float32), amax=amax).amax == 2.0

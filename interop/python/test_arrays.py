"""Torch tensors in and out, without copies."""

import copy

import numpy as np
import pytest
import torch

import nvfp4
import nvfp4.torch  # makes quantized tensors known to torch.load


@pytest.fixture
def x():
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_and_numpy_give_the_same_bytes(x, dtype):
    x = x.to(dtype)
    q = nvfp4.quantize(x, directions="both", transform="hadamard")
    assert q == nvfp4.quantize(x.float().numpy(), directions="both", transform="hadamard")
    for array, kind in ((q.codes, torch.uint8), (q.scales, torch.uint8), (q.amax, torch.float32)):
        assert isinstance(array, torch.Tensor) and array.dtype == kind
    assert isinstance(q.as_numpy().codes, np.ndarray) and isinstance(nvfp4.quantize(x.float().numpy()).as_torch().codes, torch.Tensor)
    assert q.dequantize(dtype).dtype == dtype and q.dequantize("bfloat16").dtype == torch.bfloat16
    assert nvfp4.matmul(q, q, dtype=dtype).dtype == dtype


def test_codes_and_scales_have_torchs_types(x):
    row = nvfp4.quantize(x).row
    assert row.typed_codes.dtype == torch.float4_e2m1fn_x2 and row.typed_codes.shape == (48, 32)
    assert row.typed_scales.dtype == torch.float8_e4m3fn
    assert torch.equal(row.typed_codes.view(torch.uint8), row.codes)
    scales = nvfp4.Quantizer(spec="mxfp8").quantize(x).row.typed_scales
    assert scales.dtype == torch.float8_e8m0fnu


def test_nothing_that_is_written_to_its_arrays_changes_a_quantized_tensor(x):
    for spec in ("nvfp4(hadamard)", "nvfp4(swizzled)", "mxfp8", "fp8-block", "high-precision"):
        q = nvfp4.Quantizer(spec=spec, directions="both").quantize(x)
        twin, kept = copy.copy(q), copy.deepcopy(q)
        for direction in (q.row, q.column):
            for name in ("codes", "typed_codes", "scales", "typed_scales", "swizzled_scales", "global_scale", "amax", "values"):
                try:
                    array = getattr(direction, name)
                except AttributeError:
                    continue  # it has none
                except ValueError:
                    continue  # it is not NVFP4
                array.view(torch.uint8).fill_(3)
            for part in direction.parts:
                part.view(torch.uint8).fill_(3)
        q.as_numpy().as_torch().row.parts[0].zero_()
        assert q == kept and twin == kept
        for part in q.as_numpy().row.parts:
            assert not part.flags.writeable, "numpy's are views"


def test_any_tensor_will_do(x):
    q = nvfp4.quantize(x)
    assert nvfp4.quantize(torch.nn.Parameter(x)) == q, "gradients are not followed"
    assert nvfp4.quantize(x.t().contiguous().t()) == q
    assert nvfp4.quantize(x.reshape(3, 16, 64)[:, :, 16:48]) == nvfp4.quantize(x.reshape(3, 16, 64)[:, :, 16:48].clone())
    assert nvfp4.quantize(x[0].expand(5, 64)) == nvfp4.quantize(x[0].repeat(5, 1))
    with torch.no_grad():
        assert nvfp4.quantize(torch.nn.Parameter(x)) == q


def test_an_offset_may_be_a_tensor(x):
    a = nvfp4.quantize(x, rounding="stochastic", seed=2, offset=torch.tensor(6))
    assert a == nvfp4.quantize(x, rounding="stochastic", seed=2, offset=6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_wrong_dtype_is_a_type_error(x, dtype):
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16 elements, got torch.*cast"):
        nvfp4.quantize(x.to(dtype))


def test_other_devices_and_layouts_are_refused(x):
    with pytest.raises((ValueError, BufferError, RuntimeError, NotImplementedError)):
        nvfp4.quantize(x.to("meta"))
    with pytest.raises((ValueError, BufferError, RuntimeError)):
        nvfp4.quantize(x.to_sparse())


def test_capsules_are_consumed_once(x):
    capsule = torch.utils.dlpack.to_dlpack(x)
    assert nvfp4.quantize(capsule) == nvfp4.quantize(x)
    with pytest.raises(ValueError, match="consumed already"):
        nvfp4.quantize(capsule)
    capsule = torch.utils.dlpack.to_dlpack(x)
    torch.utils.dlpack.from_dlpack(capsule)
    with pytest.raises(ValueError, match="consumed already"):
        nvfp4.quantize(capsule)


@pytest.mark.parametrize("spec", ["nvfp4(hadamard)", "mxfp8", "fp8-block", "mxfp8 / high-precision from row"])
def test_torch_saves_loads_and_sends_them(x, spec, tmp_path):
    q = nvfp4.Quantizer(spec=spec, directions="both").quantize(x.bfloat16())
    torch.save({"weights": [q], "x": x}, tmp_path / "q.pt")
    for weights_only in (True, False):
        again = torch.load(tmp_path / "q.pt", weights_only=weights_only)
        assert again["weights"] == [q] and isinstance(again["weights"][0].row.parts[0], torch.Tensor)
        assert torch.equal(again["x"], x)
    copied = copy.deepcopy(q)
    assert copied == q and not {p.data_ptr() for p in copied.row._parts()} & {p.data_ptr() for p in q.row._parts()}
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(sent, (q,)) == q


def sent(q):
    return q


def test_memory_is_given_back(x):
    import gc
    import weakref

    y = x.clone()
    watched = weakref.ref(y)
    nvfp4.quantize(y)
    del y
    gc.collect()
    assert watched() is None

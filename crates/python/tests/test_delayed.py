"""Delayed scaling: scales from the amaxes of earlier steps, which the caller keeps."""

import copy
import pickle

import numpy as np
import pytest

import nvfp4

X = np.random.default_rng(7).standard_normal((32, 64)).astype(np.float32)


def test_the_scale_is_the_callers_and_the_amax_comes_back():
    quantizer = nvfp4.Quantizer(spec="fp8-delayed", directions="both")
    for scale in (1.0, np.float32(3), np.array([0.25], np.float32)):
        q, amax, column_amax = quantizer.observe(X, scale=scale)
        assert amax.tolist() == column_amax.tolist() == [np.abs(X).max()]
        assert q == quantizer.quantize(X, scale=scale) and q.row.scales.tolist() == [[np.float32(1) / np.float32(np.float32(scale).item())]]
    assert quantizer.quantize(X) == quantizer.quantize(X, scale=1.0) == nvfp4.quantize(X, spec="fp8-delayed", directions="both")


def test_a_scale_that_follows_from_the_tensor_itself_is_current_scaling():
    scale = np.float32(448) / np.abs(X).max()
    current, delayed = nvfp4.Quantizer(spec="fp8"), nvfp4.Quantizer(spec="fp8-delayed")
    assert delayed.quantize(X, scale=scale) == current.quantize(X)
    q, amax, column_amax = current.observe(X)
    assert q == current.quantize(X) and amax is None and column_amax is None


def test_directions_may_have_scales_of_their_own():
    spec = "fp8-delayed(history=4) / fp8-delayed(e5m2, history=8)"
    assert nvfp4.Delayed.parts(spec) == {"row": "fp8-delayed(e4m3, history=4)", "column": "fp8-delayed(e5m2, history=8)"}
    q = nvfp4.Quantizer(spec=spec, directions="both").quantize(X, scale=2.0, column_scale=8.0)
    assert q.row.scales.tolist() == [[0.5]] and q.column.scales.tolist() == [[0.125]]
    assert nvfp4.Delayed.parts("fp8-delayed") == {"both": "fp8-delayed(e4m3)"} and nvfp4.Delayed.parts("nvfp4") == {}


def test_histories_move_on():
    delayed = nvfp4.Delayed("fp8-delayed(e5m2, history=3, margin=1)")
    assert delayed.history == 3 and delayed.reduction == "max"
    assert delayed.update([2.0, 7.0, 3.0], 5.0, 2.0) == ([0.0, 3.0, 2.0], 57344 / 2 / 7)
    assert delayed.update([2.0, 7.0, 3.0], 5.0, 14.0) == ([0.0, 3.0, 14.0], 57344 / 2 / 14), "another worker saw more"
    assert delayed.update([0.0, 7.0, 3.0], 5.0, 0.0) == ([0.0, 7.0, 3.0], 5.0), "nobody saw anything"
    assert pickle.loads(pickle.dumps(delayed)) == delayed == copy.deepcopy(delayed)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="takes no `scale`"):
        nvfp4.quantize(X, scale=1.0)
    with pytest.raises(ValueError, match="`scale` serves both directions"):
        nvfp4.quantize(X, spec="fp8-delayed", column_scale=1.0)
    with pytest.raises(ValueError, match="takes no `column_scale`"):
        nvfp4.quantize(X, spec="fp8-delayed / mxfp8", directions="both", column_scale=1.0)
    for scale, message in ((0.0, "above 0"), (np.inf, "above 0"), (np.nan, "above 0"), (np.ones(2, np.float32), "one scale")):
        with pytest.raises(ValueError, match=message):
            nvfp4.quantize(X, spec="fp8-delayed", scale=scale)
    with pytest.raises(ValueError, match="expected delayed scaling"):
        nvfp4.Delayed("nvfp4")
    with pytest.raises(ValueError, match="the amax rule 'mine' is not known here; 'max' and 'most-recent' are"):
        nvfp4.Delayed("fp8-delayed(amax=mine)")
    with pytest.raises(ValueError, match="expected a history of 1024 steps, got 1"):
        nvfp4.Delayed("fp8-delayed").update([1.0], 1.0, 1.0)
    with pytest.raises(ValueError, match="amax"):
        nvfp4.quantize(X, spec="fp8-delayed", amax=1.0)

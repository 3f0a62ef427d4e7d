"""Recipes that refuse NaN and infinities, in modules."""

import pytest
import torch
from test_modules import layers, model, same, step

import nvfp4
import nvfp4.te as te
import nvfp4.torch

BAD = [float("nan"), float("inf"), float("-inf")]


def refusing(name):
    return nvfp4.Recipe(name).with_finite("refuse")


def with_bad(x, bad):
    x = x.detach().clone()
    x.view(-1)[-3] = bad
    return x


@pytest.mark.parametrize("recipe", nvfp4.Recipe.presets())
def test_a_tensor_that_is_not_finite_is_refused_by_its_name(recipe):
    module = nvfp4.torch.Linear(64, 48, recipe=refusing(recipe), path="layers.0.fc")
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    plan = nvfp4.Plan(nvfp4.Recipe(recipe), [("fc", "linear")])
    for bad in BAD:
        for slot in ("input", "weight", "grad_output"):
            twin = nvfp4.torch.Linear(64, 48, recipe=module.formats and refusing(recipe), path="layers.0.fc")
            with torch.no_grad():
                twin.weight.copy_(with_bad(twin.weight, bad) if slot == "weight" else twin.weight)

            def run():
                y = twin(with_bad(x, bad) if slot == "input" else x)
                y.backward(with_bad(dy, bad) if slot == "grad_output" else dy)

            if plan.spec("fc", slot) == "high-precision":
                run()  # what is in it reaches the results
            else:
                with pytest.raises(ValueError, match=rf"layers.0.fc:{slot}: input: expected finite values, got .* at index"):
                    run()
    nvfp4.torch.check_finite(module)


def test_what_is_finite_is_computed_as_without():
    for recipe in ("nvfp4", "delayed_scaling", "mxfp8", "high_precision_fwd_mxfp8_bwd"):
        for (keeps, args), (refuses, _) in zip(layers(recipe=recipe), layers(recipe=refusing(recipe))):
            refuses.load_state_dict(keeps.state_dict())
            x = torch.randn(32, 64)
            assert same(step(keeps, x, *args), step(refuses, x, *args))


def test_names_of_tensors_in_every_kind_of_layer():
    names = set()
    for module, args in layers(recipe=refusing("nvfp4")):
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                kept = parameter.detach().clone()
                with torch.no_grad():
                    parameter.copy_(with_bad(parameter, float("nan")))
                with pytest.raises(ValueError, match="expected finite values") as raised:
                    module(torch.randn(32, 64), *args)
                names.add(str(raised.value).split(": ")[0])
                with torch.no_grad():
                    parameter.copy_(kept)
    assert names == {"linear:weight", "mlp.fc1:weight", "mlp.fc2:weight", "experts:weight[0]", "experts:weight[1]"}


def test_models_autocast_and_compilers_heed_it():
    torch._dynamo.reset()
    recipe = nvfp4.Recipe.from_toml('finite = "refuse"\n[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')
    converted, x = model(), torch.randn(32, 64)
    report = nvfp4.torch.convert_module(converted, recipe)
    assert "NaN and infinities: refused" in str(report.plan) and report.plan.finite == "refuse"
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    assert same(step(converted, x), step(compiled, x))
    for run in (converted, compiled):
        with pytest.raises(ValueError, match="^0:input: "):
            run(with_bad(x, float("nan")))
        with torch.no_grad(), pytest.raises(ValueError, match="^0:input: "):
            run(with_bad(x, float("nan")))
    layer = te.Linear(64, 48, name="fc")
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match="^fc:input: "):
        layer(with_bad(x, float("nan")))
    with te.autocast(recipe="nvfp4"):
        assert layer(with_bad(x, float("nan"))).isfinite().all()


def test_what_a_gpu_noted_is_asked_for_once():
    # The flags of a GPU, as its kernels would set them.
    whole = torch.nn.Sequential(torch.nn.Linear(64, 64), nvfp4.torch.LayerNormMLP(64, 96))
    nvfp4.torch.convert_module(whole, refusing("nvfp4"))
    assert whole[0]._not_finite is None, "on the CPU there are none"
    whole[0]._not_finite = torch.tensor([-1, 4 * 7 + 2, -1])
    whole[1]._not_finite = torch.tensor([-1, -1, 0, 4 * 3 + 1, -1, -1])
    with pytest.raises(ValueError, match=r"in 0:weight \(NaN at 7\), 1.fc1:grad_output \(inf at 0\), 1.fc2:input \(-inf at 3\)$"):
        nvfp4.torch.check_finite(whole)
    nvfp4.torch.check_finite(whole)  # the next step begins without
    nvfp4.torch.check_finite(torch.nn.Linear(4, 4))


def test_operations_that_watch_keep_torchs_rules():
    x = torch.randn(32, 64)
    for spec in ("nvfp4(hadamard)", "mxfp8", "high-precision / mxfp8"):
        torch.library.opcheck(torch.ops.nvfp4.quantize, (x, spec, "both", 0, None, None, None, "fc:input"))
        made = torch.ops.nvfp4.quantize(x, spec, "both", 0, None, None, None)
        *arrays, flag = torch.ops.nvfp4.quantize(x, spec, "both", 0, None, None, None, "fc:input")
        assert same(made, arrays) and flag.tolist() == [-1] and flag.dtype == torch.int64
    torch.library.opcheck(
        torch.ops.nvfp4.quantize_delayed, (x, "fp8-delayed", "both", 0, None, torch.ones(1), None, "fc:input")
    )


def test_what_they_become_by_default():
    # The table of docs/python.md.
    x = torch.randn(32, 64)

    def decoded(spec, bad):
        y = x.clone()
        y[1, 2] = bad
        return nvfp4.Quantizer(spec=spec, directions="row").quantize(y).dequantize()

    inside = slice(0, 16)  # the block of 16, within that of 32
    for spec in ("nvfp4", "nvfp4(row-scaled)"):
        plain = decoded(spec, 0.0)
        for bad in (float("nan"), -float("nan")):
            with_nan = decoded(spec, bad)
            assert with_nan[1, 2].abs() == with_nan[1, inside].abs().max() == plain[1, inside].abs().max()
            with_nan[1, 2] = plain[1, 2]
            assert torch.equal(with_nan, plain)
        finite = decoded(spec, float("inf")).isfinite()
        assert not finite[1].any() and bool(finite[2].all()) is bool(finite[2].any()) is (spec != "nvfp4")
    for spec in ("fp8", "fp8-delayed", "fp8-block", "fp8(e5m2)", "mxfp8"):
        lost = ~decoded(spec, float("nan")).isfinite()
        assert lost[1, 2] and lost.sum() == 1
    for spec, largest in (("fp8", 448.0), ("fp8-delayed", 448.0), ("fp8-block", 448.0), ("fp8(e5m2)", 57344.0)):
        assert decoded(spec, float("-inf"))[1, 2] == -largest and decoded(spec, float("inf")).isfinite().all()
    with_inf = decoded("mxfp8", float("inf"))
    assert with_inf[1, 2] == float("inf") and (~with_inf.isfinite()).sum() == 1
    assert not with_inf[1, :2].any() and not with_inf[1, 3:32].any() and with_inf[1, 32:].any()
    for recipe, bad, finite in [("nvfp4", BAD[0], True), ("nvfp4", BAD[1], False), ("mxfp8", BAD[0], False), ("current_scaling", BAD[1], True)]:
        module = nvfp4.torch.Linear(64, 48, recipe=recipe)
        y, _, dw, _ = step(module, with_bad(x, bad))
        assert bool(y.isfinite().all()) is bool(dw.isfinite().all()) is finite, (recipe, bad)

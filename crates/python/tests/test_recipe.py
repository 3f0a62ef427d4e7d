"""Recipes and plans."""

import pickle

import numpy as np
import pytest

import nvfp4


def test_presets_rules_and_functions_answer_by_name():
    assert "nvfp4_row_scaled" in nvfp4.Recipe.presets()
    assert nvfp4.Recipe("nvfp4").spec("fc", "weight") == "nvfp4(16x16)"
    rules = nvfp4.Recipe.from_toml('[[rule]]\npath = "head"\nspec = "high-precision"\n[default]\npreset = "mxfp8"')
    assert rules.spec("head", "input") == "high-precision" and rules.spec("fc", "input") == "mxfp8(e4m3)"
    base = nvfp4.Recipe("nvfp4")
    recipe = nvfp4.Recipe.from_function("heads plain", lambda r: "high-precision" if r.path == "head" else base.spec_of(r))
    assert recipe.spec("head", "weight") == "high-precision" and recipe.spec("fc", "weight") == "nvfp4(16x16)"
    assert base.with_backward("high-precision").spec("fc", "grad_output") == "high-precision"
    assert base == nvfp4.Recipe("nvfp4") and base != rules


def test_a_plan_gives_quantizers_in_the_directions_that_are_read():
    plan = nvfp4.Plan(nvfp4.Recipe("nvfp4"), [("fc", "linear"), ("experts", "grouped", 3), ("core", "attention")])
    assert plan.quantizer("fc", "input") == nvfp4.Quantizer(spec="nvfp4(hadamard)", directions="both")
    assert plan.quantizer("experts", "grad_output", expert=2).rounding == "stochastic"
    assert plan.spec("core", "qkv") == "high-precision" and plan.alignment("fc") == 16
    inference = nvfp4.Plan(nvfp4.Recipe("nvfp4"), [("fc", "linear")], purpose="inference")
    assert inference.quantizer("fc", "weight").directions == "row"
    assert "fc" in str(plan) and len(plan.entries) == 3 + 9 + 6 and plan.warnings == []


def test_a_plan_of_a_model_by_its_configuration():
    plan = nvfp4.Plan.from_config(nvfp4.Recipe("mxfp8"), '{"num_hidden_layers": 2}')
    assert plan.spec("model.layers.1.mlp.down_proj", "weight") == "mxfp8(e4m3)"


def test_a_factory_that_raises_is_a_value_error_with_the_role_and_the_cause():
    def factory(role):
        if role.slot == "grad_output":
            raise RuntimeError("no gradients today")
        return "nvfp4"

    recipe = nvfp4.Recipe.from_function("picky", factory)
    with pytest.raises(ValueError, match="layers.0.fc1:grad_output.*no gradients today") as raised:
        nvfp4.Plan(recipe, [("layers.0.fc1", "linear")])
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match="fc:grad_output"):
        recipe.spec("fc", "grad_output")
    with pytest.raises(ValueError, match="fc:input.*expected the text of a spec"):
        nvfp4.Recipe.from_function("none", lambda role: None).spec("fc", "input")
    with pytest.raises(ValueError, match="colour"):
        nvfp4.Recipe.from_function("typo", lambda role: "nvfp4(colour)").spec("fc", "input")


def test_a_factory_is_asked_about_each_tensor_and_its_pass():
    asked = []
    recipe = nvfp4.Recipe.from_function("asked", lambda role: asked.append(role) or "nvfp4")
    nvfp4.Plan(recipe, [("fc", "linear")])
    assert [(role.path, role.slot, role.pass_) for role in asked] == [
        ("fc", "input", "forward"),
        ("fc", "weight", "forward"),
        ("fc", "grad_output", "backward"),
    ]
    assert all(role.direction == role.pass_ for role in asked)


def test_what_is_unknown_is_named_with_what_is_known():
    with pytest.raises(ValueError, match="there are .*nvfp4_row_scaled"):
        nvfp4.Recipe("nvfp5")
    with pytest.raises(ValueError, match="'weight'"):
        nvfp4.Recipe("nvfp4").spec("fc", "weights")
    with pytest.raises(ValueError, match="grouped"):
        nvfp4.Plan(nvfp4.Recipe("nvfp4"), [("fc", "linaer")])
    with pytest.raises(ValueError, match="no such tensor"):
        nvfp4.Plan(nvfp4.Recipe("nvfp4"), [("fc", "linear")]).spec("fc2", "input")
    with pytest.raises(ValueError, match="a product reads one format"):
        nvfp4.Plan(nvfp4.Recipe.from_function("mixed", lambda r: "mxfp8" if r.slot == "input" else "nvfp4"), [("a", "linear")])


def test_a_recipe_that_refuses_what_is_not_finite():
    text = nvfp4.Recipe.from_toml('finite = "refuse"\n[default]\npreset = "mxfp8"')
    recipe = nvfp4.Recipe("mxfp8").with_finite("refuse")
    assert (recipe.finite, text.finite, nvfp4.Recipe("mxfp8").finite) == ("refuse", "refuse", "keep")
    assert recipe != nvfp4.Recipe("mxfp8") and recipe.with_finite("keep") == nvfp4.Recipe("mxfp8")
    plan = nvfp4.Plan(recipe, [("fc", "linear")])
    assert plan.finite == "refuse" and "NaN and infinities: refused" in str(plan)
    quantizer = plan.quantizer("fc", "input")
    assert quantizer == nvfp4.Quantizer(spec="mxfp8", directions="both", finite="refuse") and quantizer.finite == "refuse"
    assert quantizer == pickle.loads(pickle.dumps(quantizer)) != nvfp4.Quantizer(spec="mxfp8", directions="both")
    assert repr(quantizer) == "Quantizer(spec='mxfp8(e4m3)', directions='both', finite='refuse')"
    x = np.ones((32, 64), np.float32)
    assert quantizer.quantize(x) == nvfp4.Quantizer(spec="mxfp8", directions="both").quantize(x)
    for spec in ("nvfp4", "fp8", "fp8-block", "mxfp8", "fp8-delayed", "high-precision / mxfp8"):
        for bad in (np.nan, np.inf, -np.inf):
            x[3, 5] = bad
            nvfp4.Quantizer(spec=spec, directions="both").quantize(x)
            with pytest.raises(ValueError, match=r"expected finite values, got .* at index \[3, 5\]"):
                nvfp4.Quantizer(spec=spec, directions="both", finite="refuse").quantize(x)
    with pytest.raises(ValueError, match="unknown finite 'no'; there are 'keep', 'refuse'"):
        recipe.with_finite("no")


def test_accumulators_of_fp8_are_those_of_the_preset_unless_given():
    def of(recipe):
        return nvfp4.Plan(recipe, [("fc", "linear")]).accumulators

    assert of(nvfp4.Recipe("current_scaling")) == ("fast", "split", "split")
    assert of(nvfp4.Recipe("float8_block_scaling")) == ("split", "split", "split")
    recipe = nvfp4.Recipe("delayed_scaling").with_accumulators(fprop="precise")
    assert of(recipe) == ("precise", "split", "split") and recipe != nvfp4.Recipe("delayed_scaling")
    text = '[default]\npreset = "delayed_scaling"\n[accumulators]\nfprop = "precise"'
    assert of(nvfp4.Recipe.from_toml(text)) == of(recipe)
    assert "sums of FP8 on a GPU: fprop precise, dgrad split, wgrad split" in str(nvfp4.Plan(recipe, [("fc", "linear")]))
    with pytest.raises(ValueError, match="unknown wgrad 'slow'; there are 'precise', 'split', 'fast'"):
        recipe.with_accumulators(wgrad="slow")
    x = nvfp4.Quantizer(spec="fp8").quantize(np.ones((16, 32), np.float32))
    # A CPU adds precisely, whatever is allowed.
    assert np.array_equal(nvfp4.matmul(x, x, accumulator="fast"), nvfp4.matmul(x, x))
    with pytest.raises(ValueError, match="unknown accumulator 'half'"):
        nvfp4.matmul(x, x, accumulator="half")

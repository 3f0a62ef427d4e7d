"""TransformerEngine's recipes: fields, variables of the environment, and what they stand for."""

import warnings

import pytest
import torch

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.te.custom_recipes.quantizer_factories import nvfp4_factory
from nvfp4.te.custom_recipes.quantizer_factory_zoo import nvfp4_linear_fp8_dpa_factory
from nvfp4.te.recipe import Format, MMParams, QParams

HYBRID = [
    (te.DelayedScaling(), "delayed_scaling"),
    (te.Float8CurrentScaling(), "current_scaling"),
    (te.MXFP8BlockScaling(), "mxfp8"),
    (te.Float8BlockScaling(), "float8_block_scaling"),
    (te.NVFP4BlockScaling(), "nvfp4"),
]


def specs(recipe):
    return [recipe.recipe().spec("fc", slot) for slot in ("input", "weight", "grad_output")]


def accumulators(recipe):
    return nvfp4.Plan(recipe.recipe(), [("fc", "linear")]).accumulators


def step(layer, x):
    torch.manual_seed(7)
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize(
    "recipe, preset", HYBRID, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_step_is_that_of_the_preset_to_the_bit(recipe, preset):
    assert recipe.recipe() == nvfp4.Recipe(preset)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    theirs, ours = te.Linear(128, 128, name="fc"), nvfp4.torch.Linear(
        128, 128, recipe=preset, path="fc"
    )
    ours.load_state_dict(theirs.state_dict())
    with te.autocast(recipe=recipe):
        made = step(theirs, x)
    assert all(torch.equal(a, b) for a, b in zip(made, step(ours, x)))


KINDS = [
    "nvfp4",
    "mxfp8",
    "delayed",
    "float8_current_scaling",
    "float8_per_tensor_scaling",
    "float8_block_scaling",
    "custom",
]


@pytest.mark.parametrize(
    "recipe, kinds",
    [
        (te.DelayedScaling, {"delayed", "float8_per_tensor_scaling"}),
        (te.Float8CurrentScaling, {"float8_current_scaling", "float8_per_tensor_scaling"}),
        (te.MXFP8BlockScaling, {"mxfp8"}),
        (te.Float8BlockScaling, {"float8_block_scaling"}),
        (te.NVFP4BlockScaling, {"nvfp4"}),
        (te.CustomRecipe, {"custom"}),
        (te.Recipe, set()),
    ],
)
def test_kinds(recipe, kinds):
    assert {kind for kind in KINDS if getattr(recipe, kind)()} == kinds


@pytest.mark.parametrize(
    "recipe, input, weight, grad_output",
    [
        (te.DelayedScaling(2, Format.E4M3, 16, "most_recent", None, False),
         *["fp8-delayed(e4m3, most-recent, history=16, margin=2, local)"] * 3),
        (te.DelayedScaling(amax_history_len=4), *["fp8-delayed(e4m3, history=4)"] * 2, "fp8-delayed(e5m2, history=4)"),
        (te.Float8CurrentScaling(True), *["fp8(e4m3, pow2-scale)"] * 2, "fp8(e5m2, pow2-scale)"),
        (te.Float8CurrentScaling(fp8_format=Format.E4M3), *["fp8(e4m3)"] * 3),
        (te.MXFP8BlockScaling(0, Format.HYBRID), *["mxfp8(e4m3)"] * 2, "mxfp8(e5m2)"),
        (te.MXFP8BlockScaling(enable_2d_quantization=True), "mxfp8(e4m3)", "mxfp8(e4m3, 32x32)", "mxfp8(e4m3)"),
        (te.MXFP8BlockScaling(backward_override="high_precision"), *["mxfp8(e4m3) / high-precision"] * 2, "high-precision"),
        (te.Float8BlockScaling(True, Format.HYBRID, 1, 1, 1), *["fp8-block(e4m3, any-scale)"] * 2, "fp8-block(e5m2, any-scale)"),
        (te.NVFP4BlockScaling(True, True, True), *["nvfp4"] * 3),
        (te.NVFP4BlockScaling(nvfp4_4over6="activations"),
         "nvfp4(hadamard, 4over6-mae-strict-256)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, te.Recipe) else "",
)  # fmt: skip
def test_fields_say_what_they_say_there(recipe, input, weight, grad_output):
    canonical = [
        nvfp4.Quantizer(spec=spec, directions="both").spec for spec in (input, weight, grad_output)
    ]
    assert specs(recipe) == canonical
    assert recipe.recipe().name in (type(recipe).__name__, "mxfp8")


def test_settings_that_are_assigned_later_count():
    """As scripts of TransformerEngine's do it."""
    plain = te.NVFP4BlockScaling()
    plain.fp4_quant_fwd_inp = plain.fp4_quant_fwd_weight = plain.fp4_quant_bwd_grad = QParams()
    assert specs(plain) == ["nvfp4"] * 3
    rotated = te.NVFP4BlockScaling(disable_rht=True)
    rotated.fp4_quant_bwd_grad = QParams(random_hadamard_transform=True)
    assert specs(rotated) == ["nvfp4", "nvfp4(16x16)", "nvfp4(hadamard)"]
    blocks = te.Float8BlockScaling()
    blocks.fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.5)
    assert specs(blocks) == [
        "fp8-block(e4m3)",
        "fp8-block(e4m3, 128x128, any-scale, epsilon=0.5)",
        "fp8-block(e4m3)",
    ]


def test_products_are_added_as_the_recipe_says():
    assert (
        accumulators(te.DelayedScaling())
        == accumulators(te.Float8CurrentScaling())
        == ("fast", "split", "split")
    )
    assert accumulators(te.Float8BlockScaling()) == ("split", "split", "split")
    changed = te.Float8CurrentScaling(
        fp8_gemm_fprop=MMParams(), fp8_gemm_wgrad=MMParams(use_split_accumulator=False)
    )
    assert accumulators(changed) == ("split", "split", "fast")


@pytest.mark.parametrize(
    "recipe, variables, expected",
    [
        (te.Float8CurrentScaling, {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}, te.Float8CurrentScaling(True)),
        (te.Float8BlockScaling, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, te.Float8BlockScaling(True)),
        (te.MXFP8BlockScaling, {"NVTE_BACKWARD_OVERRIDE": "dequantized"}, te.MXFP8BlockScaling(backward_override="dequantized")),
        (te.NVFP4BlockScaling, {"NVTE_NVFP4_DISABLE_RHT": "1", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
                                "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1"}, te.NVFP4BlockScaling(True, True, True)),
        (te.NVFP4BlockScaling, {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1", "NVTE_NVFP4_4OVER6": "all",
                                "NVTE_NVFP4_4OVER6_E4M3_USE_256": "weights", "NVTE_NVFP4_4OVER6_ERR_MODE": "mse"},
         te.NVFP4BlockScaling(False, False, False, True, "all", "weights", "MSE")),
    ],
)  # fmt: skip
def test_the_environment_is_read_when_a_recipe_is_made(monkeypatch, recipe, variables, expected):
    before = recipe()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert recipe() == expected and before != expected
    assert specs(recipe()) == specs(expected) != specs(before)


def test_the_metric_in_fast_math_is_read_when_a_region_is_entered(monkeypatch):
    recipe = te.NVFP4BlockScaling(nvfp4_4over6="weights")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    assert specs(recipe)[1] == "nvfp4(16x16, 4over6-mae-fast-256)"


def entered(recipe):
    with te.autocast(recipe=recipe):
        te.Linear(64, 64)(torch.ones(32, 64))


@pytest.mark.parametrize(
    "quantize, says",
    [
        (lambda x: te.NVFP4Quantizer()(x), True),
        (lambda x: te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(x), True),
        (lambda x: te.NVFP4Quantizer(row_scaled_nvfp4=True)(x), True),
        (lambda x: entered(te.NVFP4BlockScaling()), True),
        (lambda x: entered(te.CustomRecipe(nvfp4_factory)), True),
        (lambda x: te.NVFP4Quantizer(with_2d_quantization=True)(x), False),
        (lambda x: te.NVFP4Quantizer(nvfp4_use_4over6=True)(x), False),
        (lambda x: te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x), False),
        (lambda x: entered(te.MXFP8BlockScaling()), False),
    ],
)
def test_fast_math_changes_nothing_and_says_so_at_each_quantization(monkeypatch, quantize, says):
    """Where TransformerEngine's kernels give other codes with it."""
    x = torch.randn(64, 64).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = quantize(x)
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        after = quantize(x)
    said = {str(one.message) for one in noted}
    assert any("NVTE_USE_FAST_MATH=1 changes nothing here" in text for text in said) is says
    assert before is None or after.quantized == before.quantized


ATTENTION = ("qkv", "s", "o", "do", "dp", "dqkv")
CURRENT = ["fp8(e4m3)", "fp8-delayed(e4m3, history=1, most-recent)", "fp8(e4m3)", "fp8(e5m2)",
           "fp8-delayed(e5m2, history=1, most-recent)", "fp8(e5m2)"]  # fmt: skip
DELAYED = ["fp8-delayed(e4m3, history=3)"] * 3 + ["fp8-delayed(e5m2, history=3)"] * 3
MXFP8 = ["mxfp8(e4m3)"] * 3 + ["mxfp8(e5m2)"] * 3


def of_attention(recipe):
    plan = nvfp4.Plan(recipe.recipe(), [("a", "attention"), ("fc", "linear")])
    return [plan.quantizer("a", slot).spec for slot in ATTENTION]


@pytest.mark.parametrize(
    "make, name, more, expected",
    [
        (te.NVFP4BlockScaling, "Float8CurrentScaling", {}, CURRENT),
        (te.MXFP8BlockScaling, "Float8CurrentScaling", {}, [spec.replace("e5m2", "e4m3") for spec in CURRENT]),
        (te.DelayedScaling, "Float8CurrentScaling", {}, [spec.split(", history")[0] + ")" * (", " in spec) for spec in CURRENT]),
        (te.NVFP4BlockScaling, "DelayedScaling", {"AMAX_HISTLEN": "3", "AMAX_ALGO": "max"}, DELAYED),
        (te.Float8CurrentScaling, "DelayedScaling", {"AMAX_HISTLEN": "3", "AMAX_ALGO": "max"}, DELAYED),
        (te.Float8CurrentScaling, "DelayedScaling", {"REDUCE_AMAX": "0"},
         ["fp8-delayed(e4m3, history=1, most-recent, local)"] * 3 + ["fp8-delayed(e5m2, history=1, most-recent, local)"] * 3),
        (te.NVFP4BlockScaling, "MXFP8BlockScaling", {}, MXFP8),
        (te.DelayedScaling, "MXFP8BlockScaling", {}, MXFP8),
        *((make, "F16", {}, ["high-precision"] * 6) for make in (te.NVFP4BlockScaling, te.MXFP8BlockScaling, te.DelayedScaling)),
    ],
)  # fmt: skip
def test_a_variable_names_the_formats_of_attention(monkeypatch, make, name, more, expected):
    plain = make()
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", name)
    for key, value in more.items():
        monkeypatch.setenv(f"NVTE_DPA_FP8DS_{key}", value)
    named, without = make(fp8_dpa=True), make()
    for variable in ("NVTE_DPA_FP8_RECIPE", *(f"NVTE_DPA_FP8DS_{key}" for key in more)):
        monkeypatch.delenv(variable)
    assert of_attention(named) == expected
    # Linear layers have the formats of the recipe.
    assert specs(named) == specs(without) == specs(plain)
    assert of_attention(without) == of_attention(plain) == ["high-precision"] * 6


def test_a_recipe_that_is_named_for_attention_again_is_itself(monkeypatch):
    for make in (te.DelayedScaling, te.Float8CurrentScaling, te.MXFP8BlockScaling):
        monkeypatch.delenv("NVTE_DPA_FP8_RECIPE", raising=False)
        before = make(fp8_dpa=True)
        monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", make.__name__)
        assert of_attention(make(fp8_dpa=True)) == of_attention(before)
        custom = te.CustomRecipe(nvfp4_linear_fp8_dpa_factory, fp8_dpa=True)
        assert of_attention(custom) == CURRENT


@pytest.mark.parametrize(
    "variable, value, says",
    [
        ("NVTE_DPA_FP8_RECIPE", "NVFP4BlockScaling", "NVTE_DPA_FP8_RECIPE: expected one of F16, "),
        ("NVTE_DPA_FP8_FORMAT", "E5M2", "NVTE_DPA_FP8_FORMAT: expected one of HYBRID, E4M3"),
    ],
)
def test_a_variable_that_names_nothing_is_refused(monkeypatch, variable, value, says):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=says):
        te.NVFP4BlockScaling(fp8_dpa=True)
    te.NVFP4BlockScaling()  # which asks for none


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: te.DelayedScaling(fp8_format=Format.E5M2), ValueError, "fp8_format: expected Format.HYBRID or Format.E4M3"),
        (lambda: te.DelayedScaling(backward_override="dequantized"), ValueError, "delayed scaling takes None"),
        (lambda: te.DelayedScaling(amax_compute_algo="min"), ValueError, "expected 'max', 'most_recent' or a function, got 'min'"),
        (lambda: te.DelayedScaling(scaling_factor_compute_algo=2), ValueError,
         "scaling_factor_compute_algo: expected a function"),
        (lambda: te.DelayedScalingRequest(amax_compute_algo=max).spec_in("forward"),
         NotImplementedError, "amax_compute_algo is a function"),
        (lambda: te.Float8CurrentScaling(fp8_format=Format.E2M1), ValueError, "fp8_format"),
        (lambda: te.Float8BlockScaling(fp8_dpa=True), ValueError, "fp8_dpa: Float8BlockScaling has no format that attention"),
        (lambda: te.NVFP4BlockScaling(fp8_dpa=True), ValueError, "fp8_dpa: .* as with nvfp4_linear_fp8_dpa_factory"),
        (lambda: te.MXFP8BlockScaling(backward_override="none"), ValueError, "expected one of None, 'high_precision'"),
        (lambda: te.Float8BlockScaling(x_block_scaling_dim=2), ValueError, "only one may be 2"),
        (lambda: te.Float8BlockScaling(w_block_scaling_dim=3), ValueError, "w_block_scaling_dim: expected one of 1, 2, got 3"),
        (lambda: te.Float8BlockScaling(fp8_gemm_dgrad=MMParams(False)), ValueError, "fp8_gemm_dgrad: FP8 in blocks needs"),
        (lambda: te.NVFP4BlockScaling(fp4_format=Format.E4M3), ValueError, "fp4_format"),
        (lambda: te.NVFP4BlockScaling(nvfp4_4over6="some"), ValueError, "expected one of 'none', 'weights'"),
        (lambda: te.NVFP4BlockScaling(nvfp4_4over6_err_mode="MAX"), ValueError, "expected one of 'MAE', 'MSE'"),
        (lambda: te.CustomRecipe(str, quantization_alignment=0), ValueError, "quantization_alignment must be positive"),
        (lambda: te.autocast(recipe=3).__enter__(), TypeError, "recipe: expected a recipe of nvfp4.te"),
        (lambda: te.Recipe().recipe(), NotImplementedError, "Recipe is no recipe by itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_a_recipe_does_not_take_is_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_requests_keep_scales_of_earlier_steps():
    request = te.DelayedScalingRequest(amax_history_len=4)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    asked, preset = te.Linear(64, 64, name="fc"), te.Linear(64, 64, name="fc")
    preset.load_state_dict(asked.state_dict())
    custom = te.CustomRecipe(lambda role: request)
    assert specs(custom) == specs(te.DelayedScaling(amax_history_len=4))
    for scale in (1, 8, 64):
        for layer, recipe in ((asked, custom), (preset, te.DelayedScaling(amax_history_len=4))):
            layer.zero_grad()
            with te.autocast(recipe=recipe):
                layer.made = step(layer, x * scale)
        assert all(torch.equal(a, b) for a, b in zip(asked.made, preset.made))
    with pytest.raises(ValueError, match="fc:input"), te.autocast(
        recipe=te.CustomRecipe(lambda role: te.QuantizerRequest())
    ):
        asked(x)


def test_a_region_is_entered_once_at_a_time(x=torch.ones(16, 64)):
    region, layer = te.autocast(recipe="nvfp4"), te.Linear(64, 64)
    with region:
        with pytest.raises(RuntimeError, match="entered already"), region:
            pass
        first = layer(x)
    with region:
        assert torch.equal(layer(x), first)
    decorated = te.autocast(recipe="nvfp4")(layer.forward)
    assert torch.equal(decorated(x), first)


def test_the_old_names_warn_and_do_the_same():
    layer, x = te.Linear(64, 64), torch.ones(16, 64)
    with te.autocast(recipe="nvfp4"):
        expected = layer(x)
    with pytest.warns(DeprecationWarning, match="autocast"):
        old = te.fp8_autocast(True, False, nvfp4.Recipe("nvfp4"))
    with old:
        assert torch.equal(layer(x), expected)


def test_a_region_without_a_recipe_has_the_default_one():
    layer, x = te.Linear(64, 64), torch.randn(32, 64)
    with te.autocast():
        made = layer(x)
    assert te.get_default_recipe() == te.MXFP8BlockScaling()
    with te.autocast(recipe="mxfp8"):
        assert torch.equal(layer(x), made)


@pytest.mark.parametrize("make", [te.DelayedScaling, te.Float8CurrentScaling, lambda **flags: te.CustomRecipe(str, **flags)])
def test_attention_that_hands_over_fp8_computes_in_it(make):
    with pytest.warns(UserWarning, match="fp8_mha: .* fp8_dpa=True is taken"):
        assert make(fp8_mha=True).fp8_dpa
    with pytest.warns(UserWarning, match="fp8_dpa=True is taken"), pytest.raises(ValueError, match="has no format that attention"):
        te.Float8BlockScaling(fp8_mha=True)

"""TransformerEngine's names."""

import pytest
import torch

import nvfp4
import nvfp4.te as te


@pytest.fixture
def x():
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(3))


def test_a_quantizer_stores_what_transformer_engine_stores(x):
    q = te.NVFP4Quantizer(rowwise=True, columnwise=True, with_rht=True, with_post_rht_amax=True)(x)
    same = nvfp4.quantize(x, directions="both", transform="hadamard")
    assert torch.equal(q._rowwise_data, same.row.codes) and torch.equal(q._columnwise_data, same.column.codes)
    assert q._rowwise_scale_inv.shape == (128, 4) and q._columnwise_scale_inv.shape == (128, 4)
    assert torch.equal(q._rowwise_scale_inv[:48], same.row.scales) and not q._rowwise_scale_inv[48:].any()
    assert torch.equal(q._columnwise_scale_inv[:64, :3], same.column.scales)
    assert torch.equal(q._amax_rowwise, x.abs().max().reshape(1)) and torch.equal(q._amax_columnwise, same.column.amax)
    assert torch.equal(q.dequantize(), same.dequantize()) and set(q.get_metadata()) >= {"rowwise_data", "columnwise_data"}


def test_settings_are_transformer_engines(x):
    assert te.NVFP4Quantizer(with_2d_quantization=True).spec() == "nvfp4(16x16)"
    assert te.NVFP4Quantizer(stochastic_rounding=True).spec() == "nvfp4(stochastic)"
    assert te.NVFP4Quantizer(row_scaled_nvfp4=True)(x)._amax_rowwise.shape == (48,)
    plain = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False)
    assert plain(x).quantized.column.rotation == 0
    quantizer = te.NVFP4Quantizer()
    quantizer.set_usage(columnwise=False)
    assert quantizer(x)._columnwise_data is None and quantizer.copy()(x)._columnwise_data is None
    quantizer.set_usage(rowwise=False)
    with pytest.raises(ValueError, match="neither direction"):
        quantizer(x)
    with pytest.raises(ValueError, match="with_post_rht_amax"):
        te.NVFP4Quantizer(with_rht=True)
    with pytest.raises(ValueError):
        te.NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True)


def test_leading_dimensions_stay(x):
    assert te.NVFP4Quantizer(columnwise=False)(x.reshape(3, 16, 64))._rowwise_data.shape == (3, 16, 32)


def test_modules_follow_autocast(x):
    layer = te.Linear(64, 48, name="fc")
    exact = layer(x)
    assert torch.equal(exact, x @ layer.weight.t() + layer.bias)
    with te.autocast(recipe=te.NVFP4BlockScaling()):
        quantized = layer(x)
        with te.autocast(enabled=False):
            assert torch.equal(layer(x), exact)
        assert torch.equal(layer(x), quantized)
    assert torch.equal(layer(x), exact) and not torch.equal(quantized, exact)
    with te.autocast(recipe="mxfp8"):
        layer(x).sum().backward()
    for module in (te.LayerNormLinear(64, 48), te.LayerNormMLP(64, 96), te.GroupedLinear(2, 64, 48)):
        args = ([16, 32],) if isinstance(module, te.GroupedLinear) else ()
        with te.autocast():
            module(x, *args).sum().backward()


def test_the_recipes_switches():
    spec = lambda recipe, slot: recipe.recipe().spec("fc", slot)  # noqa: E731
    assert spec(te.NVFP4BlockScaling(), "input") == "nvfp4(hadamard)"
    assert spec(te.NVFP4BlockScaling(disable_rht=True), "grad_output") == "nvfp4(stochastic)"
    assert spec(te.NVFP4BlockScaling(disable_stochastic_rounding=True), "grad_output") == "nvfp4(hadamard)"
    assert spec(te.NVFP4BlockScaling(disable_2d_quantization=True), "weight") == "nvfp4"
    assert "row-scaled" in spec(te.NVFP4BlockScaling(row_scaled_activation=True), "input")
    four = te.NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE", nvfp4_4over6_e4m3_use_256="none")
    assert spec(four, "weight") == "nvfp4(16x16, 4over6-mse-strict-448)"
    assert spec(te.NVFP4BlockScaling(backward_override="high_precision"), "grad_output") == "high-precision"


def test_a_custom_recipe_asks_its_factory_by_role(x):
    asked = []

    def factory(role):
        asked.append(role)
        if role.tensor_type == "weight":
            return te.NVFP4Quantizer(with_2d_quantization=True)
        if role.tensor_type == "grad_output":
            return te.IdentityQuantizer()
        return nvfp4.Quantizer()

    layer = te.Linear(64, 48, name="layers.0.fc")
    with te.autocast(recipe=te.CustomRecipe(qfactory=factory)):
        layer(x).sum().backward()
    assert te.QuantizerRole("linear", "weight", "layers.0.fc") in asked
    assert (layer.formats.weight.spec, layer.formats.grad_output.spec) == ("nvfp4(16x16)", "high-precision")


@pytest.mark.parametrize("answer", [None, 3, RuntimeError("not today")], ids=repr)
def test_a_factory_that_fails_is_named_with_its_role(x, answer):
    def factory(role):
        if isinstance(answer, Exception):
            raise answer
        return answer

    layer = te.Linear(64, 48, name="layers.7.fc")
    with pytest.raises(ValueError, match="layers.7.fc:input") as raised:
        with te.autocast(recipe=te.CustomRecipe(qfactory=factory)):
            layer(x)
    assert raised.value.__cause__ is not None

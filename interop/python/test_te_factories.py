"""TransformerEngine's factories: each is the preset of its name."""

import copy

import pytest
import torch

import nvfp4
import nvfp4.te as te
from nvfp4.te.custom_recipes import quantizer_factories, quantizer_factory_zoo

FACTORIES = {
    name.removesuffix("_factory"): factory
    for module in (quantizer_factories, quantizer_factory_zoo)
    for name, factory in vars(module).items()
    if name.endswith("_factory")
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_is_the_preset_of_its_name(name):
    preset, custom = nvfp4.Recipe(name), te.CustomRecipe(FACTORIES[name]).recipe()
    for expert in (None, 0):
        for slot in ("input", "weight", "output", "grad_output"):
            assert custom.spec("fc", slot, expert=expert) == preset.spec(
                "fc", slot, expert=expert
            ), (slot, expert)
    assert (
        custom.spec("core", "qkv") == "high-precision"
    ), "attention is quantized with fp8_dpa alone"
    FACTORIES[name](None)  # what is nothing's role


@pytest.mark.parametrize("name", FACTORIES)
def test_a_step_is_that_of_the_preset_to_the_bit(name):
    x, made = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)), []
    begun = te.GroupedLinear(2, 128, 128, name="experts")
    for recipe in (te.CustomRecipe(FACTORIES[name]), name):
        layer = copy.deepcopy(begun)
        torch.manual_seed(7)
        with te.autocast(recipe=recipe):
            y = layer(x, [32, 96])
        y.square().sum().backward()
        made.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*made))


def test_attention_gets_fp8():
    factory, preset = quantizer_factory_zoo.nvfp4_linear_fp8_dpa_factory, nvfp4.Recipe(
        "nvfp4_linear_fp8_dpa"
    )
    roles = {slot: te.QuantizerRole("dpa", slot, "core") for slot in ("qkv", "s", "do", "dp")}
    roles |= {
        "o": te.QuantizerRole(name="core.dpa_output"),
        "dqkv": te.QuantizerRole(name="core.dpa_grad_input"),
    }
    for slot, role in roles.items():
        answer = factory(role)
        direction = "backward" if slot.startswith("d") else "forward"
        spec = (
            answer.spec_in(direction) if isinstance(answer, te.QuantizerRequest) else answer.spec()
        )
        assert nvfp4.Quantizer(spec=spec, directions="both").spec == preset.spec("core", slot), slot


def test_quantizers_make_what_their_specs_make():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    e4m3, e5m2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
    mxfp8, nvfp4_ = te.MXFP8Quantizer(e4m3), te.NVFP4Quantizer()
    for quantizer, spec in (
        (te.Float8CurrentScalingQuantizer(e5m2, "cpu", force_pow_2_scales=True, amax_epsilon=0.5), "fp8(e5m2, pow2-scale, epsilon=0.5)"),
        (te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True), "fp8-block(e4m3, 128x128)"),
        (te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, force_pow_2_scales=False, block_scaling_dim=1), "fp8-block(any-scale)"),
        (te.MXFP8Quantizer(e4m3, with_2d_quantization=True), "mxfp8(32x32)"),
        (te.HybridQuantizer(rowwise_quantizer=mxfp8, columnwise_quantizer=nvfp4_, columnwise_source="rowwise_dequantized"),
         "mxfp8 / nvfp4 from row"),
    ):  # fmt: skip
        assert isinstance(quantizer, te.Quantizer)
        assert quantizer(x).quantized == nvfp4.Quantizer(spec=spec, directions="both").quantize(x)
        other = quantizer.copy()
        other.set_usage(columnwise=False)
        # With one scale both directions have the same codes.
        assert (other(x).quantized.column is None) == (not spec.startswith("fp8("))


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: te.MXFP8Quantizer(te.DType.kFloat4E2M1), ValueError, "fp8_dtype: expected DType.kFloat8E4M3"),
        (lambda: te.Float8BlockQuantizer(7, rowwise=True, columnwise=True, block_scaling_dim=3), ValueError, "expected 1 or 2, got 3"),
        (lambda: te.HybridQuantizer(rowwise_quantizer="nvfp4", columnwise_quantizer=te.NVFP4Quantizer()), TypeError, "rowwise_quantizer"),
        (lambda: te.HybridQuantizer(rowwise_quantizer=te.NVFP4Quantizer(), columnwise_quantizer=te.DelayedScalingRequest()), TypeError,
         "columnwise_quantizer: HybridQuantizer does not support nested QuantizerRequest .* got DelayedScalingRequest"),
        (lambda: te.HybridQuantizer(**dict.fromkeys(("rowwise_quantizer", "columnwise_quantizer"), te.NVFP4Quantizer())), ValueError,
         "the same object.*: pass a copy"),
        (lambda: te.HybridQuantizer(rowwise_quantizer=te.NVFP4Quantizer(), columnwise_quantizer=te.NVFP4Quantizer(),
                                    columnwise_source="row"), ValueError, "must be one of 'original', 'rowwise_dequantized', got 'row'"),
        (lambda: te.Quantizer(rowwise=True, columnwise=True)(torch.ones(16, 16)), NotImplementedError, "Quantizer has no format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_quantizers_do_not_take_is_named(make, error, says):
    with pytest.raises(error, match=says):
        make()

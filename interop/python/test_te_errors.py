"""What the names of TransformerEngine say about wrong use: the table of the guide."""

import pytest
import torch

import nvfp4
import nvfp4.te as te
from nvfp4.te._checks import validate_grouped_quantizer_list
from nvfp4.te.custom_recipes import quantizer_factories as factories
from nvfp4.te.custom_recipes import quantizer_factory_zoo as zoo

X = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(4))
FLAGS = {"fp8_dpa": True, "fp8_mha": True}


def called(factory, module=lambda: te.MultiheadAttention(64, 4, name="m"), **flags):
    """A call under a factory."""
    with te.autocast(recipe=te.CustomRecipe(factory, **flags)):
        module()(X)


def mixed(slot):
    return lambda role: te.NVFP4Quantizer() if role.tensor_type == slot else factories.mxfp8_factory(role)


def only_s(role):
    return te.IdentityQuantizer() if role.tensor_type == "s" else factories.mxfp8_factory(role)


def codes_under(made, used):
    """A weight that is codes of one recipe, called under another."""
    with te.quantized_model_init(recipe=made):
        layer = te.Linear(64, 64, name="fc")
    with te.autocast(recipe=used):
        layer(X)


WRONG = [
    # Recipes.
    (lambda: te.Float8BlockScaling(fp8_dpa=True), ValueError, "fp8_dpa: Float8BlockScaling has no"),
    (lambda: te.Float8BlockScaling(**FLAGS), ValueError, "fp8_dpa: Float8BlockScaling has no"),
    (lambda: te.NVFP4BlockScaling(fp8_dpa=True), ValueError, "fp8_dpa: NVFP4BlockScaling has no"),
    (lambda: te.CustomRecipe(None), TypeError, "qfactory: expected a function of a role"),
    (lambda: te.CustomRecipe("nvfp4"), TypeError, "qfactory: expected a function of a role"),
    (lambda: te.CustomRecipe(te.NVFP4Quantizer()), TypeError, "qfactory: expected a function"),
    # Regions.
    (lambda: te.autocast(te.NVFP4BlockScaling()), TypeError, "enabled: .* argument recipe="),
    (lambda: te.autocast(te.Linear(64, 64)), TypeError, "enabled: .* called inside of the region"),
    (lambda: te.autocast("nvfp4"), TypeError, "enabled: .* got str"),
    (lambda: te.autocast(True, te.NVFP4BlockScaling()), TypeError, "calibrating: .* recipe="),
    (lambda: te.autocast(recipe=te.NVFP4BlockScaling).__enter__(), TypeError, "recipe: expected"),
    (lambda: te.autocast(recipe=factories.nvfp4_factory).__enter__(), TypeError, "recipe: expected"),
    # Factories.
    (lambda: called(lambda role: None), ValueError, "m.linear_qkv:input: .* the factory returned None"),
    (lambda: called(lambda role: te.NVFP4Quantizer), ValueError, "returned the class NVFP4Quantizer"),
    (lambda: called(lambda role: te.DelayedScalingRequest), ValueError, "class DelayedScalingRequest"),
    (lambda: called(lambda role: 3), ValueError, "the factory returned 3 for module_type=linear"),
    (lambda: called(lambda role: "nvfp5"), ValueError, "unknown format 'nvfp5'"),
    (lambda: called(lambda role: 1 / 0), ValueError, "m.linear_qkv:weight: .* ZeroDivisionError"),
    # Quantizers that do not fit a module.
    (
        lambda: called(mixed("weight"), lambda: te.Linear(64, 64, name="fc")),
        ValueError,
        r"fc fprop: input.row is mxfp8\(e4m3\) but weight.row is nvfp4; a product reads one format",
    ),
    (
        lambda: codes_under(te.MXFP8BlockScaling(), te.NVFP4BlockScaling()),
        RuntimeError,
        r"'weight' of fc: its codes are mxfp8\(e4m3\), and the recipe NVFP4BlockScaling asks for nvfp4",
    ),
    (
        lambda: codes_under(te.DelayedScaling(), te.Float8CurrentScaling()),
        RuntimeError,
        r"'weight' of fc: its codes are fp8-delayed\(e4m3\), and .* asks for fp8\(e4m3\)",
    ),
    (lambda: called(factories.nvfp4_factory, fp8_dpa=True), ValueError, "attention reads high precision, FP8"),
    (
        lambda: called(factories.float8_block_scaling_factory, fp8_dpa=True),
        ValueError,
        "m.core_attention: attention reads .* but qkv is fp8-block",
    ),
    (lambda: called(only_s, fp8_dpa=True), ValueError, r"qkv is mxfp8\(e4m3\) but s is high-precision"),
    (
        lambda: called(zoo.nvfp4_linear_fp8_dpa_factory, **FLAGS),
        ValueError,
        r"m.core_attention: attention reads .* but o is nvfp4\(hadamard\), dqkv is nvfp4",
    ),
]  # fmt: skip


@pytest.mark.parametrize("use, error, says", WRONG, ids=range(len(WRONG)))
def test_wrong_use_is_named(use, error, says):
    with pytest.raises(error, match=says):
        use()


def test_a_recipe_that_is_changed_is_looked_at_again():
    recipe = te.Float8BlockScaling()
    recipe.fp8_dpa = True
    with pytest.raises(ValueError, match="fp8_dpa: Float8BlockScaling"):
        te.autocast(recipe=recipe).__enter__()


def test_an_error_leaves_modules_as_they_were():
    """The next call, under another recipe, computes as if there had been none."""
    torch.manual_seed(0)
    module, recipe = te.MultiheadAttention(64, 4, name="m", attention_dropout=0.0), te.MXFP8BlockScaling(fp8_dpa=True)
    with te.autocast(recipe=recipe):
        expected = module(X)
    for factory in (lambda role: None, factories.nvfp4_factory):
        with pytest.raises(ValueError):
            called(factory, lambda: module, fp8_dpa=True)
    with te.autocast(recipe=recipe):
        torch.testing.assert_close(module(X), expected, rtol=0, atol=0)
    torch.testing.assert_close(module(X), module(X), rtol=0, atol=0)


def test_autocast_says_nothing_to_foreign_modules():
    """Modules of torch and layers that have their own recipe compute what they compute outside."""
    torch.manual_seed(0)
    converted = torch.nn.Sequential(torch.nn.Linear(64, 64))
    nvfp4.torch.convert_module(converted, "mxfp8")
    for module in (torch.nn.Linear(64, 64), torch.nn.TransformerEncoderLayer(64, 4, 64).eval(), converted):
        expected = module(X)
        with te.autocast(recipe=te.NVFP4BlockScaling()):
            torch.testing.assert_close(module(X), expected, rtol=0, atol=0)


def test_attention_in_fp8_needs_types_that_quantizers_read():
    module, x = te.DotProductAttention(4, 16, name="core"), torch.randn(8, 2, 4, 16, dtype=torch.float64)
    with te.autocast(recipe=te.Float8CurrentScaling(fp8_dpa=True)):
        with pytest.raises(TypeError, match="core: expected query_layer in float32, bfloat16 or float16"):
            module(x, x, x)


def test_an_input_that_cannot_be_made_again_is_said():
    """``save_original_input`` asks for codes of an input that are made again later."""
    x = torch.randn(32, 64)

    class Unsafe(te.IdentityQuantizer):
        def is_requantization_safe(self):
            return False

    def grouped(layer):
        return layer(x, [16, 16])

    linear = (te.Linear, (64, 64), lambda layer: layer(x))
    for make, sizes, call in (linear, (te.GroupedLinear, (2, 64, 64), grouped)):
        layer = make(*sizes, save_original_input=True)
        with te.autocast(recipe=te.DelayedScaling()):
            with pytest.raises(ValueError, match="not supported with save_original_input"):
                call(layer)
            with torch.no_grad():
                call(layer)
            call(make(*sizes))
        for answer, says in (
            (te.DelayedScalingRequest(), "save_original_input is incompatible with delayed"),
            (Unsafe(), "Ignoring save_original_input=True"),
        ):
            recipe = te.CustomRecipe(lambda role, answer=answer: answer)
            with pytest.warns(UserWarning, match=says), te.autocast(recipe=recipe):
                call(layer).sum().backward()


def test_experts_of_which_some_are_in_high_precision_are_named():
    answers = iter([te.IdentityQuantizer()])

    def factory(role):
        return next(answers, te.MXFP8Quantizer(te.DType.kFloat8E4M3))

    with pytest.raises(ValueError, match="input quantizers mix Identity-backed and quantized"):
        with te.autocast(recipe=te.CustomRecipe(factory)):
            te.GroupedLinear(2, 64, 64)(torch.randn(32, 64), [16, 16])


def test_lists_of_quantizers_are_judged_as_transformer_engine_does():
    """By the stand-in. Modules here compute what each expert asks for."""
    current = lambda **given: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=None, **given)  # noqa: E731

    def hybrid(column, **given):
        return te.HybridQuantizer(rowwise_quantizer=current(), columnwise_quantizer=column, **given)

    mxfp8 = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    delayed = [te.Float8Quantizer(torch.tensor(scale), torch.zeros(1), te.DType.kFloat8E4M3) for scale in (1.0, 2.0)]
    usage = current()
    usage.set_usage(columnwise=False)
    for fitting in ([], [None, None], [current(), usage], delayed, [hybrid(mxfp8), hybrid(mxfp8.copy())]):
        validate_grouped_quantizer_list(fitting)
    for wrong, message in (
        ([None, mxfp8], "mix None and concrete"),
        ([mxfp8, hybrid(mxfp8)], "mix HybridQuantizer and non-hybrid"),
        ([te.IdentityQuantizer(), mxfp8], "mix Identity-backed and quantized"),
        ([current(), mxfp8], "incompatible plain backend families"),
        ([current(), current(force_pow_2_scales=True)], "incompatible plain backend configurations"),
        ([te.IdentityQuantizer(dtype=torch.float16), te.IdentityQuantizer()], "incompatible plain backend configurations"),
        ([hybrid(mxfp8), hybrid(current())], "incompatible columnwise backend families"),
        ([hybrid(mxfp8), hybrid(mxfp8, columnwise_source="rowwise_dequantized")], "mixed columnwise source policies"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"GroupedLinear input quantizers .*{message}"):
            validate_grouped_quantizer_list(wrong, operand_name="input")

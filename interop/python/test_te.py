"""TransformerEngine's names."""

import copy
import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
        if role.tensor_type == "weight":  # no answer for None is needed
            return te.NVFP4Quantizer(with_2d_quantization=True)
        if role.tensor_type == "grad_output":
            return te.IdentityQuantizer()
        return nvfp4.Quantizer()

    layer = te.Linear(64, 48, name="layers.0.fc")
    with te.autocast(recipe=te.CustomRecipe(qfactory=factory)):
        layer(x).sum().backward()
    tensors = [role and (role.module_type, role.tensor_type, role.name) for role in asked]
    named = [("linear", tensor, "layers.0.fc") for tensor in ("input", "weight", "grad_output")]
    # The output and the input's gradient have readers that are not known.
    assert tensors == [*named, None, None]
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


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: te.Linear(64, 64, symmetric_ar_type="two_shot"), "symmetric_ar_type"),
        (lambda: te.Linear(64, 64, ub_overlap_ag=True, ub_name="qkv"), "ub_overlap_ag"),
        (lambda: te.LayerNormLinear(64, 64, symmetric_ar_type="two_shot"), "symmetric_ar_type"),
        (lambda: te.GroupedLinear(2, 64, 64, tp_size=2), "tp_size"),
        (lambda: te.GroupedLinear(2, 64, 64, single_grouped_weight=True), "single_grouped_weight"),
        (lambda: te.checkpoint(torch.nn.Identity(), torch.ones(1), distribute_saved_activations=True), "distribute_saved_activations"),
        (lambda: te.Linear(64, 64)(torch.ones(16, 64), fp8_output=True), "fp8_output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_argument_that_nothing_answers_to_is_named(call, argument):
    with pytest.raises(NotImplementedError, match=f": the argument {argument} is not supported here"):
        call()


def test_positions_mean_what_they_mean_there(x):
    assert te.Linear(64, 48, False, False, None, 1, None, None, None, False).bias is None
    assert te.Linear(64, 48, True).bias is not None, "with one worker it says nothing"
    with te.autocast(True, False, te.NVFP4BlockScaling(disable_rht=True)):
        layer = te.Linear(64, 48)
        layer(x)
    assert layer.formats.input.spec == "nvfp4"
    tenth = te.NVFP4Quantizer(te.DType.kFloat4E2M1, True, True, False, None, False, False, False, False, True)
    assert tenth.spec() == "nvfp4(row-scaled)"
    four = te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE", columnwise=False)
    assert four(x).quantized == nvfp4.quantize(x, scale_rule="4over6-mse-strict-256")
    assert te.NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448, "it says something of 4over6"


def test_how_errors_of_4over6_are_computed_is_read_at_each_quantization(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(256, 1024, dtype=torch.bfloat16)
    quantizer = te.NVFP4Quantizer(nvfp4_use_4over6=True, columnwise=False)
    strict, fast = (nvfp4.quantize(x, scale_rule=f"4over6-mae-{errors}-448") for errors in ("strict", "fast"))
    assert strict != fast
    assert quantizer(x).quantized == strict
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    assert quantizer(x).quantized == fast


def test_the_arrays_of_a_tensor_are_the_tensor(x):
    for shape in ((48, 64), (3, 16, 64), (1, 64)):
        y = x.reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
        q = te.NVFP4Quantizer(columnwise=shape != (1, 64))(y)
        assert q.quantized == nvfp4.quantize(y, directions="both" if shape != (1, 64) else "row")
        q._rowwise_data.zero_()
        assert not q.dequantize().any()


def test_a_recipe_that_is_built_in_the_loop_is_asked_once(x):
    class Factory:
        def __init__(self):
            self.asked = []

        def answer(self, role):
            self.asked.append(role)
            return te.NVFP4Quantizer()

        def __call__(self, role):
            return self.answer(role)

    class Unhashable(Factory):
        __hash__ = None

    for factory, ask in ((Factory(), lambda f: f), (Factory(), lambda f: f.answer), (Unhashable(), lambda f: f)):
        layer = te.Linear(64, 48)
        for _ in range(4):
            with te.autocast(recipe=te.CustomRecipe(qfactory=ask(factory))):
                layer(x).sum().backward()
        once = len(factory.asked)
        named = [role for role in factory.asked if role is not None]
        assert len(named) == len(set(named)), "each role once"
        with te.autocast(recipe=te.CustomRecipe(qfactory=ask(factory), backward_override="high_precision")):
            layer(x)
        assert len(factory.asked) > once, "with other settings it is another recipe"
    first, second = Factory(), Factory()
    layer = te.Linear(64, 48)
    for factory in (first, second):
        with te.autocast(recipe=te.CustomRecipe(qfactory=factory)):
            layer(x)
    assert first.asked and second.asked


def gradients(module, run, x, recipe):
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    with te.autocast(recipe=recipe):
        y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "delayed_scaling"])
def test_torchs_own_checkpoint_computes_again_in_the_recipe_of_the_call(x, recipe, reentrant):
    model = torch.nn.Sequential(te.LayerNormLinear(64, 64, name="a"), torch.nn.GELU(), te.Linear(64, 64, name="b"))
    again = copy.deepcopy(model)
    model(x), again(x)  # outside, in high precision
    for _ in range(2):
        expected = gradients(model, model, x, recipe)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = gradients(again, lambda x: checkpoint(again, x, use_reentrant=reentrant), x, recipe)
        assert all(torch.equal(a, b) for a, b in zip(expected, made))
    assert torch.equal(model(x), again(x))


def test_a_call_that_cannot_be_told_from_another_is_warned_about(x):
    layer = te.Linear(64, 64, name="fc")
    outputs = []
    for recipe in ("nvfp4", "mxfp8"):
        with te.autocast(recipe=recipe):
            outputs.append(checkpoint(layer, x.clone().requires_grad_(), use_reentrant=True))
    with pytest.warns(RuntimeWarning, match=r"Linear 'fc' is computed again .* \(nvfp4, mxfp8\).*te.checkpoint"):
        outputs[1].sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe="nvfp4"):
            checkpoint(layer, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


@pytest.mark.parametrize("module", [te.Linear(64, 64), te.LayerNormMLP(64, 96), te.GroupedLinear(1, 64, 64)], ids=lambda m: type(m).__name__)
def test_threads_call_one_module_in_regions_of_their_own(x, module):
    args = ([48],) if isinstance(module, te.GroupedLinear) else ()

    def once(recipe):
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x, *args)

    recipes = [None, "nvfp4", "mxfp8"]
    expected = {recipe: once(recipe) for recipe in recipes}
    begin, wrong = threading.Barrier(len(recipes)), []

    def work(recipe):
        for _ in range(20):
            begin.wait()  # all of them call it at once
            wrong.extend([recipe] if not torch.equal(once(recipe), expected[recipe]) else [])

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in recipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_a_call_computes_in_is_not_read_from_the_module(x):
    """The call of another thread, between the plan and the product of this one, changes nothing."""

    class Between(te.Linear):
        def state_of(self, formats, prefix=""):  # asked after the plan, before anything is computed
            if not self.__dict__.get("busy"):
                layer.busy = True
                with te.autocast(recipe="mxfp8"):
                    layer(x)
                layer.busy = False
            return super().state_of(formats, prefix)

    layer, plain = Between(64, 48), te.Linear(64, 48)
    plain.load_state_dict(layer.state_dict())
    with te.autocast(recipe="nvfp4"):
        assert torch.equal(layer(x), plain(x))


def test_regions_belong_to_their_threads(x):
    layer, seen = te.Linear(64, 48), []
    with te.autocast():
        thread = threading.Thread(target=lambda: seen.append(layer(x)))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], layer(x))


@pytest.mark.parametrize("module", [te.Linear(64, 64), te.LayerNormLinear(64, 64), te.LayerNormMLP(64, 96), te.GroupedLinear(2, 64, 64)], ids=lambda m: type(m).__name__)
def test_a_state_dict_of_transformer_engine_loads(module):
    model = torch.nn.Sequential(module)
    theirs = {**{name: torch.ones_like(p) for name, p in module.state_dict().items()}, "_extra_state": torch.zeros(7, dtype=torch.uint8)}
    assert not any(module.load_state_dict(theirs, strict=True))
    model.load_state_dict({f"0.{name}": value for name, value in theirs.items()}, strict=True)
    assert all((p == 1).all() for p in module.parameters())
    with pytest.raises(RuntimeError, match="more"):
        module.load_state_dict({**theirs, "more": torch.ones(1)})


def test_compiled_modules_follow_regions_too(x):
    layer = te.Linear(64, 48)
    compiled = torch.compile(layer, backend="aot_eager")
    for recipe in ("nvfp4", "mxfp8", "nvfp4"):
        with torch.no_grad(), te.autocast(recipe=recipe):
            assert torch.equal(compiled(x), layer(x))
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))

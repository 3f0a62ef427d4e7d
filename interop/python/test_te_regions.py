"""TransformerEngine's regions, and what stands beside them."""

import copy
import io
import pickle

import pytest
import torch

import nvfp4.te as te
from nvfp4.te.standin._quantization import FP8GlobalStateManager as State


def modules():
    return [
        te.Linear(64, 64),
        te.LayerNormLinear(64, 64),
        te.LayerNormMLP(64, 96),
        te.GroupedLinear(2, 64, 64),
    ]


def results(module, x, recipe):
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    with te.autocast(recipe=recipe):
        y = module(x, *([16, 32],) if isinstance(module, te.GroupedLinear) else ())
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize(
    "recipe",
    [te.NVFP4BlockScaling(), te.MXFP8BlockScaling(), te.Float8CurrentScaling()],
    ids=lambda r: type(r).__name__,
)
def test_weights_that_are_codes_alone_give_the_same_step(recipe):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    plain = modules()
    torch.manual_seed(1)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        coded = modules()
        with te.quantized_model_init(enabled=False):
            assert type(te.Linear(64, 64).weight) is torch.nn.Parameter
    assert type(te.Linear(64, 64).weight) is torch.nn.Parameter
    for before, module in zip(plain, coded):
        for name in module.weights():
            weight = getattr(module, name)
            assert isinstance(weight, te.QuantizedTensor) and weight.requires_grad
            assert weight.spec == recipe.recipe().spec("any", "weight")
            assert torch.equal(weight.get_high_precision_init_val(), getattr(before, name))
            weight.clear_high_precision_init_val()
            assert weight.get_high_precision_init_val() is None
        assert all(
            torch.equal(a, b)
            for a, b in zip(results(before, x, recipe), results(module, x, recipe))
        )


def test_a_weight_of_codes_may_have_a_direction_in_high_precision():
    fp8 = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")
    plain = te.IdentityQuantizer()

    def factory(role):
        if role is not None and role.tensor_type == "weight":
            return te.HybridQuantizer(rowwise_quantizer=plain, columnwise_quantizer=fp8)
        return plain

    recipe, x = te.CustomRecipe(factory), torch.randn(48, 64)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = te.Linear(64, 64)
    other, begun = te.Linear(64, 64), layer.weight.get_high_precision_init_val()
    other.load_state_dict({"weight": begun, "bias": layer.bias.detach()})
    made = [results(module, x, recipe) for module in (layer, other)]
    assert all(torch.equal(a, b) for a, b in zip(*made))
    assert not torch.equal(made[0][1], results(other, x, "high_precision")[1])


def test_the_columns_of_a_weight_of_codes_may_be_made_of_its_rows():
    mxfp8, nvfp4_ = te.MXFP8Quantizer(te.DType.kFloat8E4M3), te.NVFP4Quantizer()

    def factory(role):
        if role is not None and role.tensor_type == "weight":
            return te.HybridQuantizer(
                rowwise_quantizer=mxfp8, columnwise_quantizer=nvfp4_, columnwise_source="rowwise_dequantized"
            )
        if role is not None and role.tensor_type == "grad_output":
            return te.HybridQuantizer(rowwise_quantizer=nvfp4_, columnwise_quantizer=mxfp8)
        return mxfp8

    recipe = te.CustomRecipe(factory)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(64, 64)
    assert layer.weight.spec == "mxfp8(e4m3) / nvfp4 from row"
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    with te.quantized_model_init(recipe=recipe):
        other = te.Linear(64, 64)
    other.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=False))
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())


def test_weights_that_are_codes_alone_go_on():
    """They train, they are copied and saved, and regions of other recipes read them."""
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        layer = te.Linear(64, 64)
    x = torch.randn(32, 64)
    assert layer.weight.spec == "mxfp8(e4m3)", "the default recipe's"
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())
        assert torch.equal(
            other.weight.get_high_precision_init_val(), layer.weight.get_high_precision_init_val()
        )
    torch.testing.assert_close(
        layer(x), torch.nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    )
    before, optimizer = layer.weight.dequantize(), torch.optim.SGD(layer.parameters(), 1.0)
    with te.autocast():
        layer(x).square().sum().backward()
    optimizer.step()
    assert isinstance(layer.weight, te.MXFP8Tensor) and not torch.equal(
        layer.weight.dequantize(), before
    )
    plain = te.Linear(64, 64)
    with te.quantized_model_init():
        assert not hasattr(te.Linear(64, 64).weight, "get_high_precision_init_val")
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight.dequantize())


def test_codes_and_old_names_say_what_to_do():
    with pytest.warns(DeprecationWarning, match="use quantized_model_init"), te.fp8_model_init(
        True, te.NVFP4BlockScaling()
    ):
        assert te.Linear(64, 64).weight.spec == "nvfp4(16x16)"


@pytest.mark.parametrize(
    "recipe",
    [
        te.DelayedScaling(amax_history_len=4),
        te.CustomRecipe(lambda role: te.DelayedScalingRequest(amax_history_len=4)),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_weights_that_are_codes_alone_have_delayed_scaling(recipe):
    """The scale begins at 1. What an optimizer writes is quantized with the scale of the steps
    before, and its amax moves on with the next region.
    """
    with te.quantized_model_init(recipe=recipe):
        layers = modules()
    for layer in layers:
        layer.zero_grad()
        optimizer, amaxes = torch.optim.SGD(layer.parameters(), 0.1), []
        name, (prefix, _, _) = layer.weights()[0], layer._products[0]
        weight, kept = getattr(layer, name), getattr(layer.delayed, f"{prefix}weight")
        assert isinstance(weight, te.Float8Tensor) and weight._scale_inv.item() == 1
        for step in range(3):
            amaxes.append(kept.history[0].item())
            scale = kept.scale.item()
            results(layer, torch.randn(48, 64), recipe)
            assert kept.history.tolist() == [0] * (4 - len(amaxes)) + amaxes
            assert kept.scale.item() == pytest.approx(448 / max(amaxes)) != scale or step
            layer.fp8_meta, optimizer.step()  # whoever looks at it in between
            assert weight._scale_inv.item() == pytest.approx(1 / kept.scale.item())
            assert kept.history[0].item() > 0
    # Another length of the history is another quantizer, with the scale so far, also of a layer that
    # was moved.
    before = kept.scale.item()
    weight = getattr(layer._apply(torch.clone), name)
    with pytest.warns(UserWarning, match="Quantizer is being updated"):
        results(layer, torch.randn(48, 64), te.DelayedScaling(amax_history_len=2))
    assert weight._quantizer.scale.item() == pytest.approx(before, rel=0.2)


def test_a_hybrid_weight_of_codes_has_delayed_scaling_in_each_direction():
    """With the same rule in both directions it is a weight of one quantizer, step by step."""
    delayed = lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3)  # noqa: E731

    def in_two(role):
        if role is None or role.tensor_type != "weight":
            return te.DelayedScalingRequest()
        return te.HybridQuantizer(rowwise_quantizer=delayed(), columnwise_quantizer=delayed())

    kinds = [te.CustomRecipe(in_two), te.CustomRecipe(lambda role: te.DelayedScalingRequest())]
    trained = []
    for recipe in kinds:
        torch.manual_seed(2)
        with te.quantized_model_init(recipe=recipe):
            layer = te.Linear(64, 64)
        optimizer, steps = torch.optim.SGD(layer.parameters(), 0.1), []
        for step in range(3):
            x = torch.randn(48, 64, generator=torch.Generator().manual_seed(step))
            steps += [*results(layer, x, recipe), layer.weight.dequantize()]
            optimizer.step()
        trained.append((layer, steps))
    (two, first), (one, second) = trained
    assert type(two.weight) is te.HybridQuantizedTensor and type(one.weight) is te.Float8Tensor
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    scales = dict(two.delayed.named_children())
    assert scales["weight_row"].scale == scales["weight_column"].scale == one.delayed.weight.scale != 1


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4", "fp8_block_scaling", "bf16"])
def test_every_format_is_there(monkeypatch, name):
    ask = getattr(te, f"is_{name}_available")
    for there, capability in ((False, None), (True, (9, 0)), (True, (8, 0))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        assert ask() is True and ask(return_reason=True) == (True, "")
        assert te.get_device_compute_capability() == (capability or (0, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    available, reason = ask(True)
    assert not available and "8.0" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")
def test_graphs_need_a_gpu():
    layer, x = te.Linear(64, 64), torch.ones(16, 64)
    with pytest.raises(RuntimeError, match="torch sees no GPU here; on the CPU call the modules"):
        te.make_graphed_callables(layer, (x,), enabled=True)
    with pytest.warns(DeprecationWarning, match="fp8_enabled is deprecated"), pytest.raises(
        RuntimeError, match="no GPU"
    ):
        te.make_graphed_callables(layer, (x,), fp8_enabled=True)


def test_states_of_random_numbers_go_their_own_ways():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    tracker.add("other", 8)
    torch.manual_seed(3)
    with tracker.fork():
        inside = torch.rand(4)
    outside = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), outside), "as if nothing had been drawn inside"
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), inside)
    with tracker.fork():
        assert not torch.equal(torch.rand(4), inside), "it moved on"
    with pytest.raises(RuntimeError, match="seed 7 is used already"):
        tracker.add("third", 7)
    with pytest.raises(RuntimeError, match="there is a state 'other' already"):
        tracker.add("other", 9)
    with pytest.raises(KeyError, match="there is no state 'none'"), tracker.fork("none"):
        pass
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    assert set(tracker.get_states()) == {"model-parallel-rng", "other"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_again(reentrant):
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    drawn, layer = [], te.Linear(64, 64)

    def run(x):
        with tracker.fork():
            drawn.append(torch.rand(4))
        return layer(x)

    x = torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe="nvfp4"):
        y = te.checkpoint(
            run, x, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker, tp_group=None
        )
    with tracker.fork():
        after = torch.rand(4)
    y.sum().backward()
    assert len(drawn) == 2 and torch.equal(*drawn) and not torch.equal(drawn[0], after)
    with tracker.fork():
        third = torch.rand(4)
    torch.manual_seed(7)
    assert torch.equal(
        torch.cat([drawn[0], after, third]), torch.cat([torch.rand(4) for _ in range(3)])
    )
    with pytest.warns(DeprecationWarning, match="as keyword arguments"):
        te.checkpoint(
            run, False, lambda: tracker, None, x, use_reentrant=reentrant
        ).sum().backward()


@pytest.mark.parametrize(
    "make",
    [lambda: te.Linear(64, 48), lambda: te.LayerNormMLP(64, 96), lambda: te.GroupedLinear(2, 64, 48)],
)
def test_calibration_notes_amaxes_and_quantizes_nothing(make):
    """The scales of the step after it are those of a step that quantizes; gradients have none."""
    x, recipe = torch.randn(32, 64), te.DelayedScaling(amax_history_len=2)
    torch.manual_seed(0)
    module = make()
    more = ([16, 16],) if isinstance(module, te.GroupedLinear) else ()
    other, plain = copy.deepcopy(module), module(x, *more)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        torch.testing.assert_close(module(x, *more), plain, rtol=0, atol=0)
    with te.autocast(recipe=recipe):
        other(x, *more)
    for of in (module, other):
        with te.autocast(recipe=recipe):  # a step begins, with the amaxes of the one before
            of(x, *more)
    # What the second layer of a module reads differs, as the first one is quantized or not.
    scales = [dict(of.delayed.named_children()) for of in (module, other)]
    for name, of in scales[0].items():
        if name.endswith("grad_output"):
            assert of.scale.item() == 1
        else:
            assert of.scale.item() != 1
            torch.testing.assert_close(of.scale, scales[1][name].scale, rtol=0.2, atol=0)
    torch.testing.assert_close(module(x, *more), plain, rtol=0, atol=0)


def test_calibration_says_nothing_where_no_scale_is_kept():
    x, module = torch.randn(32, 64), te.Linear(64, 48)
    plain = module(x)
    for enabled in (False, True):
        with te.autocast(enabled, calibrating=True, recipe=te.MXFP8BlockScaling()):
            y = module(x)
        assert torch.equal(y, plain) is not enabled
    assert module.delayed is None


def told():
    return tuple(
        getattr(State, name)()
        for name in ("is_fp8_enabled", "is_fp8_calibration", "get_fp8_recipe", "get_fp8_group")
    )


def test_programs_are_told_what_their_region_was_told():
    asked, group = te.NVFP4BlockScaling(), object()
    outside = (False, False, te.get_default_recipe(), None)
    assert told() == outside
    for enabled in (True, False):
        for calibrating in (True, False):
            with te.autocast(enabled, calibrating, asked, group):
                assert told() == (enabled, calibrating, asked, group)
                with te.autocast(enabled=False):
                    assert told() == outside
                assert told() == (enabled, calibrating, asked, group)
    assert told() == outside


def test_a_region_can_be_left_and_taken_up_again():
    x, module = torch.randn(32, 64), te.Linear(64, 48)
    plain = module(x)
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        expected, state = module(x), State.get_autocast_state()
    assert torch.equal(module(x), plain) and not torch.equal(expected, plain)
    before = State.get_autocast_state()
    State.set_autocast_state(state)
    assert State.is_fp8_enabled() and torch.equal(module(x), expected)
    State.set_autocast_state(before)
    assert not State.is_fp8_enabled() and torch.equal(module(x), plain)
    State.set_autocast_state(state)
    State.reset()
    assert not State.is_fp8_enabled() and torch.equal(module(x), plain)
    with pytest.raises(TypeError, match="expected what get_autocast_state.. gave, got tuple"):
        State.set_autocast_state((False, False, None, None, False, False))


def test_programs_are_told_how_new_weights_begin():
    def asked():
        return State.with_fp8_parameters(), State.with_high_precision_init_val()

    assert asked() == (False, False)
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        assert asked() == (True, True)
        with te.quantized_model_init(enabled=False):
            assert asked() == (False, False)
        assert asked() == (True, True)
    assert asked() == (False, False)


def test_weights_that_are_said_to_be_the_same_are_noted():
    assert State.get_skip_fp8_weight_update_tensor() is None
    for said in (True, False):
        State.set_skip_fp8_weight_update_tensor(said)
        assert State.get_skip_fp8_weight_update_tensor().tolist() == [said]
    State.reset()
    assert State.get_skip_fp8_weight_update_tensor() is None
    assert State.fp8_graph_capturing() is False


def test_what_modules_do_by_themselves_is_refused_by_name():
    for name in ("add_fp8_tensors_to_global_buffer", "is_first_fp8_module", "autocast_enter"):
        with pytest.raises(AttributeError, match=f"FP8GlobalStateManager.{name} is not supported here: "):
            getattr(State, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        State.nothing

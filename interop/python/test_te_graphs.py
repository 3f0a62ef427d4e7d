"""``te.make_graphed_callables``, with graphs of the CPU that repeat torch's operations: they have
the numbers of calls, and what waits for a GPU in a capture is an error here too.
"""

import cpu_graphs
import pytest
import torch

import gpu_te
import nvfp4.te as te
from gpu_te import HIDDEN, same, steps


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    cpu_graphs.install(monkeypatch.setattr)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def sample(**kwargs):
    return torch.ones(gpu_te.TOKENS, gpu_te.BATCH, HIDDEN, requires_grad=True, **kwargs)


@pytest.mark.parametrize("case", gpu_te.CASES, ids=lambda case: ",".join(map(str, case)))
def test_a_graph_has_the_numbers_of_calls(case):
    plain, _ = steps(case, "cpu", False)
    made, model = steps(case, "cpu", True, cache_quantized_params=case[1] != "high precision")
    assert same(plain, made)
    model.reset()
    assert "forward" not in model.__dict__ and "reset" not in model.__dict__


def test_a_capture_leaves_scales_and_random_numbers():
    torch.manual_seed(3)
    recipe, layer = te.DelayedScaling(amax_history_len=3), te.Linear(HIDDEN, HIDDEN)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            layer(torch.randn(8, HIDDEN)).sum().backward()
    before, random = {k: v.clone() for k, v in layer.state_dict().items()}, torch.get_rng_state()
    step = layer._step
    te.make_graphed_callables(layer, (sample(),), enabled=True, recipe=recipe)
    after = layer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random, torch.get_rng_state()) and layer._step is step
    # Scales move on from one region to the next, and outside of regions they stay.
    layer(torch.randn(gpu_te.TOKENS, gpu_te.BATCH, HIDDEN)).sum().backward()
    assert torch.equal(layer.delayed.input.scale, before["delayed.input.scale"])
    with te.autocast(recipe=recipe):
        layer(torch.randn(gpu_te.TOKENS, gpu_te.BATCH, HIDDEN))
    assert not torch.equal(layer.delayed.input.scale, before["delayed.input.scale"])


def test_each_layer_of_a_graph_ends_its_step_once():
    def run(graphed):
        torch.manual_seed(5)
        recipe = te.DelayedScaling(amax_history_len=4)
        model = torch.nn.Sequential(*(te.Linear(HIDDEN, HIDDEN) for _ in range(3)))
        if graphed:
            te.make_graphed_callables(model, (sample(),), enabled=True, recipe=recipe)
        for _ in range(3):
            with te.autocast(recipe=recipe):
                y = model(gpu_te.tokens("cpu").requires_grad_())
            y.backward(gpu_te.tokens("cpu"))
        return list(model.state_dict().values())

    assert same(run(False), run(True))


def test_keyword_arguments_are_inputs_of_the_graph():
    layer = te.TransformerLayer(
        HIDDEN, HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0,
        self_attn_mask_type="arbitrary",
    )  # fmt: skip
    size = gpu_te.TOKENS
    masks = [torch.rand(gpu_te.BATCH, 1, size, size) < p for p in (0.0, 0.3, 0.6)]
    inputs = [gpu_te.tokens("cpu") for _ in masks]
    expected = [layer(x, attention_mask=m).detach() for x, m in zip(inputs, masks)]
    te.make_graphed_callables(
        layer, (sample(),), sample_kwargs={"attention_mask": masks[0].clone()}
    )
    made = [layer(x, attention_mask=m).detach().clone() for x, m in zip(inputs, masks)]
    assert same(expected, made)
    with pytest.raises(TypeError, match="the call misses attention_mask"):
        layer(inputs[0])
    with pytest.raises(TypeError, match="the call has no encoder_output"):
        layer(inputs[0], attention_mask=masks[0], encoder_output=inputs[0])
    layer.eval()
    assert torch.equal(layer(inputs[0], attention_mask=masks[0]), expected[0]), "as it was"


def test_the_order_of_a_pipeline():
    layers = torch.nn.ModuleList(te.Linear(HIDDEN, HIDDEN) for _ in range(2))
    assert gpu_te.pipeline(layers, "cpu")


def test_a_forward_that_others_had_replaced_comes_back():
    layer, x = te.Linear(HIDDEN, HIDDEN), gpu_te.tokens("cpu")
    plain = layer(x).detach()
    layer.forward = lambda x, forward=layer.forward: 2 * forward(x)
    te.make_graphed_callables(layer, (sample(),))
    assert torch.equal(layer(x), 2 * plain)
    layer.reset()
    assert torch.equal(layer(x), 2 * plain) and "reset" not in layer.__dict__


@pytest.mark.parametrize("order", [None, [1, 2, -2, -1]])
def test_hooks_are_called_outside_of_the_capture(order):
    modules, seen = (torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), []

    def hooks(number):
        def hook(kind):
            def call(module):
                assert module is modules[number] and not torch.cuda.is_current_stream_capturing()
                seen.append((number, kind))

            return {0: call}

        return {kind: hook(kind) for kind in te._capture.HOOKS}

    samples = tuple((torch.ones(4, 8, requires_grad=True),) for _ in modules)
    made = te.make_graphed_callables(
        modules, samples, 2, _order=order, capture_time_hooks=[hooks(0), hooks(1)],
        pre_warmup_hook=lambda: seen.append("begin"), post_warmup_hook=lambda: seen.append("end"),
    )  # fmt: skip
    forward = [(n, kind) for n in (0, 1) for kind in ("forward_pre_hooks", "forward_hooks")]
    backward = [(n, kind) for n in (1, 0) for kind in ("backward_pre_hooks", "backward_hooks")]
    assert seen == ["begin", *(forward + backward) * 2, "end", *forward, *backward]
    for graph in made:
        graph(torch.randn(4, 8, requires_grad=True)).sum().backward()
        graph.reset()
    assert len(seen) == 2 + 3 * 8


@pytest.mark.parametrize("clone, skip", [(True, False), (True, True), (False, False)])
def test_gradients_of_parameters_are_copies_unless_they_are_not_asked_for(clone, skip):
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight.skip_backward_post_hook = skip
    te.make_graphed_callables(layer, (torch.ones(4, 8),), clone_param_grads_on_return=clone)
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient))
    for _ in range(2):
        layer.zero_grad()
        layer(torch.randn(4, 8)).backward(torch.randn(4, 8))
    assert (seen[0].data_ptr() == seen[1].data_ptr()) is (skip or not clone)


def test_the_first_micro_batch_begins_main_grad():
    def run(graphed):
        torch.manual_seed(0)
        layer = te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(HIDDEN, HIDDEN)
        if graphed:
            te.make_graphed_callables(layer, (sample(),), enabled=True)
        for first in (True, False):
            x = gpu_te.tokens("cpu").requires_grad_()
            with te.autocast():
                layer(x, is_first_microbatch=first).sum().backward()
        return layer.weight.main_grad

    assert torch.equal(run(False), run(True))


def test_evaluation_is_a_forward_pass_alone():
    layer, x = te.Linear(HIDDEN, HIDDEN).eval(), gpu_te.tokens("cpu")
    with te.autocast(), torch.no_grad():
        expected = layer(x)
    te.make_graphed_callables(layer, (sample(),), enabled=True)
    made = layer(x)
    assert torch.equal(made, expected) and not made.requires_grad


def test_some_modules_compute_in_high_precision():
    layers, x = [te.Linear(HIDDEN, HIDDEN) for _ in range(2)], gpu_te.tokens("cpu")
    with te.autocast():
        quantized = layers[0](x).detach()
    plain = layers[1](x).detach()
    samples = (sample(),), (sample(),)
    made = te.make_graphed_callables(tuple(layers), samples, enabled=(True, False))
    assert torch.equal(made[0](x), quantized) and torch.equal(made[1](x), plain)


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"enabled": True, "fp8_enabled": True}, ValueError, "fp8_enabled is the old name"),
        ({"enabled": (True, False)}, ValueError, "expected one answer or 1"),
        ({"_order": [1, -1, 1]}, ValueError, "_order: each chunk needs 1 forward passes"),
        ({"_order": [-1, 1]}, ValueError, "a backward pass after each"),
        ({"_order": [1, 2, -2, -1]}, ValueError, "_order: 2 chunks"),
        ({"_order": [1, -1, -1.5]}, NotImplementedError, "gradients of weights as events"),
        ({"_reuse_graph_input_output_buffers": True}, ValueError, "give its _order"),
        ({"capture_time_hooks": []}, ValueError, "capture_time_hooks: expected 1"),
        ({"capture_time_hooks": [{"hooks": {}}]}, ValueError, "expected forward_pre_hooks"),
        ({"sample_kwargs": {"number": 3}}, TypeError, "a graph reads tensors alone"),
    ],
)  # fmt: skip
def test_what_graphs_do_not_take_is_named(given, error, says):
    with pytest.raises(error, match=says):
        te.make_graphed_callables(te.Linear(HIDDEN, HIDDEN), (sample(),), **given)


def test_modules_that_cannot_be_captured_are_named():
    hooked = te.Linear(HIDDEN, HIDDEN)
    hooked.register_forward_hook(lambda *_: None)
    later = te.Linear(HIDDEN, HIDDEN, delay_wgrad_compute=True)
    for module, error, says in (
        (hooked, RuntimeError, "Linear has hooks"),
        (later, NotImplementedError, "delay_wgrad_compute"),
        (torch.relu, TypeError, "graphs of builtin_function_or_method"),
    ):
        with pytest.raises(error, match=says):
            te.make_graphed_callables(module, (sample(),))
    layer = te.Linear(HIDDEN, HIDDEN)
    te.make_graphed_callables(layer, (sample(),), enabled=True, cache_quantized_params=True)
    with pytest.raises(ValueError, match="is_first_microbatch: .* each call gives it"):
        layer(gpu_te.tokens("cpu"))
    with pytest.raises(TypeError, match="captured with 1 tensors, got 2"):
        layer(gpu_te.tokens("cpu"), gpu_te.tokens("cpu"), is_first_microbatch=True)
    unused = torch.nn.Module()
    unused.forward = lambda x, y: x * 2
    with pytest.raises(RuntimeError, match="input 1 of Module .*allow_unused_input=True"):
        te.make_graphed_callables(unused, (sample(), sample()))

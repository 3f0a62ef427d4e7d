"""Delayed scaling in modules: what it computes, and where its state goes."""

import copy
import pickle
import warnings

import pytest
import torch
from test_modules import model, same, step
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch._ops import _partly

SHORT = nvfp4.Recipe.from_function(
    "short", lambda role: f"fp8-delayed({'e5m2' if role.slot == 'grad_output' else 'e4m3'}, history=3)"
)
LARGEST = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def data(seed, rows=32, cols=64):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def test_steps_are_those_of_the_rule():
    module = nvfp4.torch.Linear(64, 48, recipe=SHORT)
    quantizers = {
        slot: nvfp4.Plan(SHORT, [("linear", "linear")]).quantizer("linear", slot) for slot in ("input", "weight", "grad_output")
    }
    scales, seen = dict.fromkeys(quantizers, torch.ones(1)), {slot: [] for slot in quantizers}
    for number in range(5):
        x = data(number) * (number + 1)
        y, dx, dw, db = step(module, x)
        dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        made = {}
        for slot, tensor in (("input", x), ("weight", module.weight), ("grad_output", dy)):
            made[slot], amax, _ = quantizers[slot].observe(tensor, scale=scales[slot])
            assert torch.equal(amax, tensor.detach().abs().max().reshape(1))
            seen[slot].append(amax)
        assert torch.equal(y, nvfp4.matmul(made["input"], made["weight"], bias=module.bias.detach()))
        assert torch.equal(dx, nvfp4.matmul(made["grad_output"], made["weight"].column))
        assert torch.equal(dw, nvfp4.matmul(made["grad_output"].column, made["input"].column))
        assert torch.equal(db, dy.sum(0))
        nvfp4.torch.update_scales(module)
        with torch.no_grad():
            module.weight.mul_(1.5)
        for slot in quantizers:
            window = torch.cat(seen[slot][-3:])
            scales[slot] = torch.tensor([LARGEST[slot]]) / window.max()
            kept = module.delayed.get_submodule(slot)
            assert torch.equal(kept.scale, scales[slot])
            # The step under way has none yet; of the earlier ones as many are left as fit.
            earlier = torch.cat(seen[slot][-2:])
            assert kept.history[0] == 0 and torch.equal(kept.history[3 - len(earlier) :], earlier)


@pytest.mark.parametrize("recipe", ["delayed_scaling", "fp8-delayed(history=2) / mxfp8", "mxfp8 / fp8-delayed(history=2)"])
def test_every_kind_of_layer_has_it(recipe):
    if "/" in recipe:
        spec = recipe
        recipe = nvfp4.Recipe.from_function(spec, lambda role: spec if role.slot != "grad_output" else spec.split(" / ")[1])
    for module, args, count in [
        (nvfp4.torch.LayerNormLinear(64, 48, recipe=recipe), (), 3),
        (nvfp4.torch.LayerNormMLP(64, 96, recipe=recipe), (), 6),
        (nvfp4.torch.GroupedLinear(2, 64, 48, recipe=recipe), ([16, 16],), 6),
        (nvfp4.torch.convert_module(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe).model, (), 3),
    ]:
        before = buffers(module)
        for number in range(2):
            step(module, data(number), *args)
            nvfp4.torch.update_scales(module)
        after = buffers(module)
        assert len(after) in (2 * count, 4 * count // 3) and all(not torch.equal(before[name], after[name]) for name in after)


def test_what_is_not_trained_is_not_remembered():
    module = nvfp4.torch.Linear(64, 48, recipe=SHORT)
    before = buffers(module)
    with torch.no_grad():
        y = module(data(1))
    assert torch.equal(y, module(data(1))) and not all(torch.equal(before[name], b) for name, b in buffers(module).items())
    module = copy.deepcopy(module)
    nvfp4.torch.update_scales(module)
    before = buffers(module)
    with torch.no_grad():
        module(100 * data(1))
    nvfp4.torch.update_scales(module)
    assert all(torch.equal(before[name], buffer) for name, buffer in buffers(module).items())


def test_micro_batches_count_as_one_step():
    whole, parts = (nvfp4.torch.Linear(64, 48, recipe=SHORT) for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    x = data(3, rows=64)
    step(whole, x)
    for half in (x[:32], x[32:]):
        step(parts, half)
    assert torch.equal(whole.delayed.input.history, parts.delayed.input.history)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_have_the_same_scales(reentrant):
    plain = nvfp4.torch.convert_module(model(), SHORT).model
    again = copy.deepcopy(plain)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = again

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    checkpointed = Checkpointed()
    for number in range(3):
        assert same(step(plain, data(number)), step(checkpointed, data(number)))
        for layer in (plain, again):
            nvfp4.torch.update_scales(layer)
        assert same(list(plain.buffers()), list(again.buffers()))


def test_compiled_whole_without_a_break():
    torch._dynamo.reset()
    eager = nvfp4.torch.convert_module(model(), SHORT).model
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for number in range(3):
        assert same(step(eager, data(number)), step(compiled, data(number)))
        for module in (eager, twin):
            nvfp4.torch.update_scales(module)
        assert same(list(eager.buffers()), list(twin.buffers()))


def test_state_dicts_have_it(tmp_path):
    trained = nvfp4.torch.convert_module(model(), SHORT).model
    assert "0.delayed.input.scale" in trained.state_dict() and "2.delayed.grad_output.history" in trained.state_dict()
    step(trained, data(1))
    nvfp4.torch.update_scales(trained)
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    again = nvfp4.torch.convert_module(model(), SHORT).model
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(list(trained.buffers()), list(again.buffers())) and same(step(trained, data(2)), step(again, data(2)))
    fresh = nvfp4.torch.convert_module(model(), SHORT).model
    fresh.load_state_dict(model().state_dict())  # of a model that has none: it begins anew
    assert all(scale == 1 for name, scale in fresh.named_buffers() if name.endswith("scale"))
    torch.save(trained, tmp_path / "model.pt")
    assert same(step(torch.load(tmp_path / "model.pt", weights_only=False), data(3)), step(trained, data(3)))


def test_its_numbers_stay_float32():
    module = nvfp4.torch.Linear(64, 48, recipe=SHORT)
    step(module, data(1))
    nvfp4.torch.update_scales(module)
    before = buffers(module)
    module.bfloat16()
    assert module.weight.dtype == torch.bfloat16
    assert all(torch.equal(before[name], buffer) and buffer.dtype == torch.float32 for name, buffer in buffers(module).items())
    step(module, data(2).bfloat16())
    with torch.device("meta"):
        module = nvfp4.torch.Linear(64, 48, recipe=SHORT)
    module.to_empty(device="cpu")
    assert {name: buffer.tolist() for name, buffer in buffers(module).items() if "input" in name} == {
        "delayed.input.scale": [1.0],
        "delayed.input.history": [0.0, 0.0, 0.0],
    }


def test_another_recipe_keeps_what_has_the_same_rule():
    module = nvfp4.torch.Linear(64, 48, recipe=SHORT)
    step(module, data(1))
    nvfp4.torch.update_scales(module)
    before = buffers(module)
    module.use_recipe("nvfp4")
    step(module, data(2))
    module.use_recipe(SHORT)
    assert all(torch.equal(before[name], buffer) for name, buffer in buffers(module).items())
    module.use_recipe("delayed_scaling")
    assert module.delayed.input.history.shape == (1024,) and all(b.item() == 1 for n, b in buffers(module).items() if "scale" in n)


def test_autocast_moves_on_from_region_to_region():
    module, layer = nvfp4.torch.Linear(64, 48, recipe=SHORT), te.Linear(64, 48, name="fc")
    layer.load_state_dict(module.state_dict())  # before its first region: it is kept until the recipe is known
    for number in range(4):
        expected = step(module, data(number))
        torch.manual_seed(7)
        layer.zero_grad()
        x = data(number).requires_grad_()
        with te.autocast(recipe=SHORT):
            with te.autocast(enabled=False):
                layer(x)
            y = layer(x)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        assert same(expected, [y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
        nvfp4.torch.update_scales(module)
        with torch.no_grad(), te.autocast(recipe=SHORT):
            layer(100 * data(number))
        assert torch.equal(module.delayed.input.scale, layer.delayed.input.scale)


def test_scales_move_on_at_the_end_of_each_pass():
    """Those of the forward pass when the outermost region is left, those of gradients after the
    backward pass that reaches the first module, once for each step.
    """
    first, last = te.Linear(64, 64, name="a"), te.Linear(64, 64, name="b")

    def moved(*layers):
        kept = [list(layer.delayed.children()) for layer in layers]
        return [[of.history[1:].count_nonzero().item() for of in each] for each in kept]

    outputs = []
    for number in range(2):  # both forward passes come before the backward passes
        with te.autocast(recipe=SHORT):
            with te.autocast(recipe=SHORT):
                middle = first(data(number).requires_grad_())
            assert moved(first) == [[number, number, 0]]
            outputs.append((middle, last(middle)))
        assert moved(first, last) == [[number + 1, number + 1, 0]] * 2
    for number, (middle, y) in enumerate(outputs):
        y.sum().backward()
        assert moved(first, last) == [[2, 2, number + 1]] * 2
    with torch.no_grad(), te.autocast(recipe=SHORT):
        first(data(9))
    assert moved(first, last) == [[2, 2, 2]] * 2


def test_a_recipe_brings_functions_for_amaxes_and_scales():
    """One that chooses as the rule does gives its numbers; others give their own."""

    def largest(history):
        return history.max(dim=0).values

    def scale(amax, scale, fp8_max, recipe):
        return torch.where(amax > 0, fp8_max / amax / 2**recipe.margin, scale)

    def mean(history):
        return history[history > 0].mean().reshape(1)

    torch.manual_seed(0)
    layers = [te.Linear(64, 64, name="fc")]
    layers += [copy.deepcopy(layers[0]) for _ in range(2)]
    same_rule = {"amax_compute_algo": largest, "scaling_factor_compute_algo": scale}
    algorithms = ({}, same_rule, {"amax_compute_algo": mean})
    amaxes = []
    for number in range(3):
        x = data(number)
        amaxes.append(x.abs().max())
        for layer, given in zip(layers, algorithms):
            layer.zero_grad()
            with te.autocast(recipe=te.DelayedScaling(amax_history_len=4, margin=1, **given)):
                y = layer(x)
            y.sum().backward()
    assert same(list(layers[0].buffers()), list(layers[1].buffers()))
    scales = layers[2].delayed.input.scale
    torch.testing.assert_close(scales, 224 / torch.stack(amaxes).mean().reshape(1))
    copy.deepcopy(layers[2])


def test_a_later_microbatch_has_the_weight_of_the_first():
    """Its scale moves on, but the codes of the first serve again. Without a word they do not."""
    layer, weights = te.Linear(64, 64), []
    for first in (True, False, None):
        with te.autocast(recipe=SHORT):
            layer(data(0), is_first_microbatch=first)
        weights.append(layer.delayed.weight.history.count_nonzero().item())
    assert weights == [1, 1, 2]


def test_a_region_inside_of_what_is_computed_again_repeats_it():
    torch.manual_seed(0)
    plain = te.Linear(64, 64, name="fc")
    again = copy.deepcopy(plain)

    def inside(layer):
        def run(x):
            with te.autocast(recipe=SHORT):
                return layer(x)

        return run

    for number in range(3):
        results = []
        repeated = lambda x: te.checkpoint(inside(again), x, use_reentrant=False)  # noqa: E731
        for layer, run in ((plain, inside(plain)), (again, repeated)):
            x = data(number).requires_grad_()
            layer.zero_grad()
            y = run(x)
            (y * data(100 + number)).sum().backward()
            results.append([y.detach(), x.grad, layer.weight.grad.clone()])
        assert same(*results) and same(list(plain.buffers()), list(again.buffers()))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [SHORT, nvfp4.Recipe("nvfp4"), nvfp4.Recipe("mxfp8")], ids=repr)
def test_what_te_computes_again_is_what_it_computed(recipe, reentrant):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(te.Linear(64, 64, name="fc1"), torch.nn.GELU(), te.Linear(64, 64, name="fc2"))
    again = copy.deepcopy(plain)
    for number in range(3):
        results = []
        for module, run in ((plain, plain), (again, lambda x: te.checkpoint(again, x, use_reentrant=reentrant))):
            torch.manual_seed(number)
            module.zero_grad()
            x = data(number).requires_grad_()
            with te.autocast(recipe=recipe):
                y = run(x)
            (y * data(100 + number)).sum().backward()
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())])
        assert same(*results) and same(list(plain.buffers()), list(again.buffers()))


def test_a_step_that_was_saved_or_copied_ends_too(tmp_path):
    def train(layer, number):
        x = data(number).requires_grad_()
        with te.autocast(recipe=SHORT):
            y = layer(x)
        y.backward(data(number)[:, :48])
        return [y.detach(), x.grad]

    layer, loaded = te.Linear(64, 48, name="fc"), te.Linear(64, 48, name="fc")
    train(layer, 0)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    copied = copy.deepcopy(layer)
    for number in (1, 2):
        expected = train(layer, number)
        assert same(expected, train(loaded, number)) and same(expected, train(copied, number))
    assert same(list(layer.buffers()), list(loaded.buffers())) and same(list(layer.buffers()), list(copied.buffers()))


@pytest.mark.parametrize("allowed", [False, True])
def test_scales_in_checkpoints_of_transformer_engine(monkeypatch, allowed):
    """They are a pickle, with a column for each tensor: input, weight, output; gradients of the
    output and the input. It is read if the environment allows it.
    """
    recipe = te.DelayedScaling(amax_history_len=4)
    kept = {
        "scale_fwd": torch.tensor([2.0, 3.0, 1.0]), "scale_bwd": torch.tensor([5.0, 1.0]),
        "amax_history_fwd": torch.arange(12.0).reshape(4, 3),
        "amax_history_bwd": torch.arange(8.0).reshape(4, 2),
        "recipe": recipe, "extra_fp8_variables": {},
    }  # fmt: skip
    for name in ("amax_history_fwd", "amax_history_bwd"):
        kept[name][0] = 0  # no step is under way
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", str(int(allowed)))
    data = pickle.dumps(kept)
    layer = te.Linear(64, 64, name="fc")
    state = te.Linear(64, 64).state_dict()
    state["_extra_state"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer.load_state_dict(state)
    expected = [] if allowed else ["fc: the scales of delayed scaling"]
    assert [str(of.message)[:33] for of in said] == expected
    with te.autocast(recipe=recipe):
        scales = layer.following().state_of(layer.formats)
    assert [of.scale.item() for of in scales] == ([2, 3, 5] if allowed else [1, 1, 1])
    assert scales.weight.history.tolist() == ([0, 4, 7, 10] if allowed else [0] * 4)
    # A checkpoint of another recipe has nothing to read.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0")
    other = pickle.dumps({"recipe": te.MXFP8BlockScaling(), "extra_fp8_variables": {}})
    state["_extra_state"] = torch.frombuffer(bytearray(other), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.Linear(64, 64).load_state_dict(state)


def test_a_rule_that_nobody_knows():
    recipe = nvfp4.Recipe.from_function("named", lambda role: "fp8-delayed(amax=mine)")
    with pytest.raises(ValueError, match="the amax rule 'mine' is not known"):
        nvfp4.torch.Linear(64, 48, recipe=recipe)


@pytest.mark.parametrize("directions", ["row", "column", "both"])
@pytest.mark.parametrize(
    "spec",
    ["fp8-delayed / high-precision", "fp8-delayed / high-precision from row", "high-precision / fp8-delayed(e5m2)"],
)
def test_a_direction_beside_high_precision_is_made_alone_as_a_gpu_does_it(spec, directions):
    x, asked = data(1), nvfp4.Delayed.parts(spec)
    scale = torch.tensor([3.0]) if "row" in asked else None
    column_scale = torch.tensor([5.0]) if "column" in asked else None
    whole = nvfp4.Quantizer(spec=spec, directions=directions)
    q, amax, column_amax = whole.observe(x, scale=scale, column_scale=column_scale)
    made, seen, column_seen = _partly(x, spec, directions, {"scale": scale}, {"scale": column_scale})
    expected = [part for side in (q.row, q.column) if side is not None for part in side.parts]
    assert len(made) == len(expected)
    assert all(torch.equal(a, b.reshape(a.shape)) for a, b in zip(made, expected))
    for ours, theirs in ((seen, amax), (column_seen, column_amax)):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_a_step_ends_among_the_workers_that_it_began_with(monkeypatch):
    ended = []
    note = lambda layers, passes: ended.extend((*of, *passes) for of in layers)  # noqa: E731
    monkeypatch.setattr(te._recipe, "update", note)
    monkeypatch.setattr(te._modules, "update", lambda layers: None)
    module, workers = te.Linear(64, 48), object()
    with te.autocast(recipe=SHORT, amax_reduction_group=workers):
        y = module(data(1))
    assert ended == [(module, workers, "forward")]
    module(data(2))  # outside, where no worker is asked
    y.sum().backward()
    assert ended[1:] == [(module, workers, "backward")]


@pytest.mark.filterwarnings("ignore:.*to a meta parameter")
def test_a_layer_that_knows_no_recipe_yet_keeps_scales_where_its_parameters_are():
    trained = te.Linear(64, 48)
    with te.autocast(recipe=SHORT):
        trained(data(1)).sum().backward()
    fresh = te.Linear(64, 48, device="meta")
    fresh.load_state_dict(trained.state_dict())
    assert {buffer.device.type for buffer in fresh.buffers()} == {"meta"}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_checkpoints_of_models_without_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    plain, trained = model(), nvfp4.torch.convert_module(model(), SHORT).model
    step(trained, data(1))
    nvfp4.torch.update_scales(trained)
    # A plain checkpoint, distributed, into a model with delayed scaling, which keeps the scales that it has.
    dcp.save(plain.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    fresh = nvfp4.torch.convert_module(torch.nn.Sequential(*(copy.deepcopy(layer) for layer in plain)), SHORT).model
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "plain", planner=dcp.DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    fresh.load_state_dict(state)
    assert torch.equal(fresh[0].weight, plain[0].weight) and fresh[0].delayed.input.scale == 1
    # The state of a model with delayed scaling into a plain one.
    left = plain.load_state_dict(trained.state_dict(), strict=False)
    assert left.missing_keys == [] and all(".delayed." in key for key in left.unexpected_keys)
    dcp.save(trained.state_dict(), checkpoint_id=tmp_path / "delayed", no_dist=True)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "delayed", no_dist=True)
    plain.load_state_dict(state)
    assert torch.equal(trained[0].weight, plain[0].weight)


def test_a_weight_of_codes_leaves_the_scales_of_its_input_delayed():
    specs = {"input": "fp8-delayed", "weight": "fp8", "grad_output": "high-precision"}
    recipe = nvfp4.Recipe.from_function("delayed input", lambda role: specs[role.slot])
    plain, codes = (nvfp4.torch.Linear(64, 64, recipe=recipe) for _ in range(2))
    nvfp4.torch.quantize_parameters(codes, directions="row")
    for layer in (plain, codes):
        layer(torch.full((32, 64), 3.0)).sum().backward()
        with torch.no_grad():
            layer(torch.full((32, 64), 9.0))  # which is not to be remembered
        assert layer.delayed.input.history[0] == 3

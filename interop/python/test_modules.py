"""Modules: what they compute, state dicts, conversion of models, recomputation, compilers."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch._ops import _partly

RECIPES = nvfp4.Recipe.presets()


def step(module, x, *args):
    """Output and gradients of one step."""
    torch.manual_seed(7)
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x, *args)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(left, right) for left, right in zip(a, b))


def multiplied(a, b, bias=None):
    """The product of two directions, or of numbers that are not quantized."""
    if a.format.startswith("high-precision") and b.format.startswith("high-precision"):
        left, right = (d.values if d.side == "row" else d.values.t() for d in (a, b))
        return left @ right.t() + (0 if bias is None else bias)
    return nvfp4.matmul(a, b, bias=bias)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_products_are_those_of_the_quantized_operands(recipe):
    torch.manual_seed(0)
    module, x = nvfp4.torch.Linear(64, 48, recipe=recipe), torch.randn(128, 64)
    y, dx, dw, db = step(module, x)
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    plan = nvfp4.Plan(nvfp4.Recipe(recipe), [("linear", "linear")])
    torch.manual_seed(7)
    quantizer = plan.quantizer("linear", "grad_output")
    drawn = {"seed": 0, "offset": torch.randint(2**62, (1,))} if quantizer.rounding == "stochastic" else {}
    dyq = quantizer.quantize(dy, **drawn)
    xq, wq = plan.quantizer("linear", "input").quantize(x), plan.quantizer("linear", "weight").quantize(module.weight)
    assert torch.equal(y, multiplied(xq.row, wq.row, module.bias.detach()))
    assert torch.equal(dx, multiplied(dyq.row, wq.column))
    assert torch.equal(dw, multiplied(dyq.column, xq.column))
    assert torch.equal(db, dy.sum(0))


@pytest.mark.parametrize("tokens", [31, 64, 127])
def test_the_gradient_of_a_bias_is_torchs(tokens):
    module, plain = nvfp4.torch.Linear(64, 48), torch.nn.Linear(64, 48)
    x, dy = torch.randn(tokens, 64), torch.randn(tokens, 48)
    for layer in (module, plain):
        layer(x).backward(dy)
    assert torch.equal(module.bias.grad, plain.bias.grad)


def test_tokens_are_padded_to_whole_blocks_and_back():
    torch.manual_seed(0)
    module, x = nvfp4.torch.Linear(64, 48), torch.randn(3, 11, 64)
    padded = torch.cat([x.reshape(33, 64), torch.zeros(15, 64)])
    assert torch.equal(module(x), module(padded)[:33].reshape(3, 11, 48))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_and_autocast(dtype):
    module = nvfp4.torch.Linear(64, 48, dtype=dtype)
    y, dx, dw, db = step(module, torch.randn(32, 64, dtype=dtype))
    assert {t.dtype for t in (y, dx, dw, db)} == {dtype}
    module = nvfp4.torch.Linear(64, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw, db = step(module, torch.randn(32, 64))
    assert y.dtype == torch.bfloat16 and dw.dtype == torch.float32


def test_layers_with_norms():
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    for name in ("LayerNorm", "RMSNorm"):
        module = nvfp4.torch.LayerNormLinear(64, 48, normalization=name)
        alone = nvfp4.torch.Linear(64, 48)
        alone.load_state_dict({"weight": module.weight, "bias": module.bias})
        norm = getattr(torch.nn, name)(64, eps=1e-5)
        assert same(step(module, x)[:2], step(torch.nn.Sequential(norm, alone), x)[:2])
    with pytest.raises(ValueError, match="'LayerNorm', 'RMSNorm'"):
        nvfp4.torch.LayerNormLinear(64, 48, normalization="BatchNorm")


ACTIVATIONS = {
    "gelu": torch.nn.GELU("tanh"),
    "relu": torch.nn.ReLU(),
    "silu": torch.nn.SiLU(),
    "swiglu": lambda x: torch.nn.functional.silu(x[..., :96]) * x[..., 96:],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_feed_forward_layer_is_its_parts(activation):
    torch.manual_seed(0)
    x, mlp = torch.randn(32, 64), nvfp4.torch.LayerNormMLP(64, 96, activation=activation)
    fc1, fc2 = nvfp4.torch.Linear(64, mlp.fc1_weight.shape[0]), nvfp4.torch.Linear(96, 64)
    fc1.load_state_dict({"weight": mlp.fc1_weight, "bias": mlp.fc1_bias})
    fc2.load_state_dict({"weight": mlp.fc2_weight, "bias": mlp.fc2_bias})

    class Parts(torch.nn.Module):
        def forward(self, x):
            return fc2(ACTIVATIONS[activation](fc1(torch.nn.functional.layer_norm(x, (64,)))))

    assert same(step(mlp, x)[:2], step(Parts(), x)[:2])


def test_an_activation_that_is_not_known():
    with pytest.raises(ValueError, match="'gelu'"):
        nvfp4.torch.LayerNormMLP(64, 48, activation="tanh")


def test_experts_are_layers_side_by_side():
    torch.manual_seed(0)
    module, x = nvfp4.torch.GroupedLinear(3, 64, 48), torch.randn(50, 64)
    y = module(x, [20, 0, 30])
    assert torch.equal(module(x, torch.tensor([20, 0, 30])), y)
    alone = nvfp4.torch.Linear(64, 48)
    with torch.no_grad():
        for expert, (start, end) in {0: (0, 20), 2: (20, 50)}.items():
            alone.weight.copy_(getattr(module, f"weight{expert}"))
            alone.bias.copy_(getattr(module, f"bias{expert}"))
            assert torch.equal(alone(x[start:end]), y[start:end])
    y.sum().backward()
    assert module.weight1.grad is None or not module.weight1.grad.any()
    with pytest.raises(ValueError, match="add up to 50"):
        module(x, [20, 20, 20])


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*layers)


def test_state_dicts_go_both_ways(tmp_path):
    plain, converted = model(), nvfp4.torch.convert_module(model(), "nvfp4").model
    assert list(plain.state_dict()) == list(converted.state_dict())
    converted.load_state_dict(plain.state_dict())
    plain.load_state_dict(converted.state_dict())
    torch.save(converted.state_dict(), tmp_path / "state.pt")
    again = nvfp4.torch.convert_module(model(), "nvfp4").model
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    x = torch.randn(32, 64)
    assert same(step(converted, x), step(again, x))
    whole = copy.deepcopy(converted)
    assert same(step(converted, x), step(whole, x))


def test_a_model_is_converted_by_the_names_of_its_layers():
    rules = '[[rule]]\npath = "3"\nspec = "high-precision"\n[[rule]]\npath = "2"\npreset = "mxfp8"\n[default]\npreset = "nvfp4"'
    plain = model()
    weight = plain[0].weight
    converted = nvfp4.torch.convert_module(plain, nvfp4.Recipe.from_toml(rules)).model
    assert converted is plain and converted[0].weight is weight
    assert converted[0].formats.weight.spec == "nvfp4(16x16)" and converted[2].formats.weight.spec == "mxfp8(e4m3)"
    assert type(converted[3]) is torch.nn.Linear
    only = nvfp4.torch.convert_module(model(), "nvfp4", filter_fn=lambda layer, name: name == "2").model
    assert [type(layer) is torch.nn.Linear for layer in only] == [True, False, False, True]
    assert type(nvfp4.torch.convert_module(torch.nn.Linear(64, 64), "nvfp4").model) is nvfp4.torch.Linear


def test_a_recipe_that_does_not_fit_changes_nothing():
    def factory(role):
        if role.path == "2":
            raise KeyError("no answer")
        return "nvfp4"

    plain = model()
    with pytest.raises(ValueError, match="2:input.*no answer"):
        nvfp4.torch.convert_module(plain, nvfp4.Recipe.from_function("partial", factory))
    assert all(not isinstance(layer, nvfp4.torch.Linear) for layer in plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(reentrant):
    converted, x = nvfp4.torch.convert_module(model(), "nvfp4").model, torch.randn(32, 64)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = converted

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    assert same(step(converted, x), step(Checkpointed(), x))


NEAREST = '[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"'


@pytest.mark.parametrize("recipe", [nvfp4.Recipe.from_toml(NEAREST), "mxfp8", "high_precision_fwd_mxfp8_bwd"], ids=str)
def test_compiled_whole_without_a_break(recipe):
    torch._dynamo.reset()
    converted, x = nvfp4.torch.convert_module(model(), recipe).model, torch.randn(32, 64)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    assert same(step(converted, x), step(compiled, x))
    other = torch.randn(48, 64)
    assert same(step(converted, other), step(compiled, other)), "another number of tokens"


def test_compiled_with_random_numbers():
    # A compiler may draw in another order than eager torch, so gradients are other ones, from the same seed the same.
    torch._dynamo.reset()
    converted, x = nvfp4.torch.convert_module(model(), "nvfp4").model, torch.randn(32, 64)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    eager, first = step(converted, x), step(compiled, x)
    assert torch.equal(eager[0], first[0]) and same(first, step(compiled, x))

def test_compiled_modules():
    recipe = nvfp4.Recipe.from_toml(NEAREST)
    for module, args in [
        (nvfp4.torch.LayerNormLinear(64, 48, recipe=recipe), ()),
        (nvfp4.torch.LayerNormMLP(64, 96, recipe=recipe), ()),
        (nvfp4.torch.GroupedLinear(2, 64, 48, recipe=recipe), ([16, 16],)),
    ]:
        torch._dynamo.reset()
        compiled, x = torch.compile(module, fullgraph=True, backend="aot_eager"), torch.randn(32, 64)
        assert same(step(module, x, *args), step(compiled, x, *args))


def test_the_operations_keep_torchs_rules():
    x = torch.randn(32, 64)
    for spec in ("nvfp4(hadamard)", "mxfp8", "high-precision", "fp8-block"):
        torch.library.opcheck(torch.ops.nvfp4.quantize, (x, spec, "both", 0, None, None, None))
    for spec, scales in (("fp8-delayed", (torch.ones(1), None)), ("mxfp8 / fp8-delayed", (None, torch.ones(1)))):
        torch.library.opcheck(torch.ops.nvfp4.quantize_delayed, (x, spec, "both", 0, None, *scales))
    q = torch.ops.nvfp4.quantize(x, "nvfp4", "row", 0, None, None, None)
    args = (q, "nvfp4", "row", [32, 64], q, "nvfp4", "row", [32, 64], None, torch.float32)
    torch.library.opcheck(torch.ops.nvfp4.matmul, args)


def test_stochastic_rounding_follows_torchs_seed():
    module, x = nvfp4.torch.Linear(64, 48), torch.randn(32, 64)
    first = step(module, x)
    assert same(first, step(module, x))
    module.zero_grad()
    torch.manual_seed(8)
    y = module(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    assert torch.equal(y, first[0]) and not torch.equal(module.weight.grad, first[2])


def test_a_model_learns():
    torch.manual_seed(0)
    converted = nvfp4.torch.convert_module(model(), "nvfp4").model
    optimizer = torch.optim.AdamW(converted.parameters(), 3e-3)
    x, target = torch.randn(128, 64), torch.randint(10, (128,))
    assert not torch.equal(converted(x).argmax(1), target)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(converted(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(converted(x).argmax(1), target), "every example has its class, drawn at random"


def layers(**settings):
    """One layer of each kind, with what it is called with beside the input."""
    return [
        (nvfp4.torch.Linear(64, 64, **settings), ()),
        (nvfp4.torch.LayerNormLinear(64, 64, **settings), ()),
        *((nvfp4.torch.LayerNormMLP(64, 96, activation=activation, **settings), ()) for activation in ACTIVATIONS),
        (nvfp4.torch.GroupedLinear(2, 64, 64, **settings), ([16, 16],)),
    ]


def te_layers():
    made = [te.Linear(64, 64), te.LayerNormLinear(64, 64), te.LayerNormMLP(64, 96), te.GroupedLinear(2, 64, 64)]
    return [(module, ([16, 16],) if isinstance(module, te.GroupedLinear) else ()) for module in made]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "delayed_scaling", "high_precision"])
def test_a_bias_alone_is_trained(recipe):
    for module, args in layers(recipe=recipe) + te_layers():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("bias" in name and "layer_norm" not in name)
        x = torch.randn(32, 64)
        with te.autocast(recipe=recipe):
            y = module(x, *args)
        y.backward(torch.ones_like(y))
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        assert {name for name, grad in grads.items() if grad is not None} == {
            name for name in grads if "bias" in name and "layer_norm" not in name
        }
        for name in ("bias", "fc2_bias"):
            if name in grads:
                assert torch.equal(grads[name], torch.full_like(grads[name], 32.0))


@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda y: (y * y).sum()], ids=["linear", "square"])
def test_gradients_of_gradients_are_an_error(loss):
    for module, args in layers(recipe="mxfp8"):
        x, before = torch.randn(32, 64, requires_grad=True), torch.nn.Linear(64, 64)
        leaves = [x, *before.parameters(), *module.parameters()]
        for first in torch.autograd.grad(loss(module(before(x), *args)), leaves[:2], create_graph=True):
            with pytest.raises(RuntimeError, match="gradients of gradients"):
                first.square().sum().backward(retain_graph=True)
            for leaf in (x, before.weight, next(module.parameters())):
                with pytest.raises(RuntimeError, match="gradients of gradients"):
                    torch.autograd.grad(first.square().sum(), leaf, retain_graph=True)
        once, marked = (torch.autograd.grad(module(x, *args).sum(), x, create_graph=again)[0] for again in (False, True))
        assert torch.equal(once, marked.detach())


def test_modules_are_pickled_copied_and_saved(tmp_path):
    x = torch.randn(32, 64)
    for recipe in ("nvfp4", "delayed_scaling"):
        for module, args in layers(recipe=recipe):
            expected = step(module, x, *args)
            torch.save(module, tmp_path / "module.pt")
            copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
            for again in [*copies, torch.load(tmp_path / "module.pt", weights_only=False)]:
                assert same(expected, step(again, x, *args)) and repr(again) == repr(module)
    for module, _ in te_layers():
        assert repr(pickle.loads(pickle.dumps(module))) == repr(module)


def test_parameters_are_drawn_anew_after_a_meta_device():
    for number, (module, _) in enumerate(layers(recipe="delayed_scaling")):
        with torch.device("meta"):
            empty = layers(recipe="delayed_scaling")[number][0]
        empty.to_empty(device="cpu")
        torch.manual_seed(3)
        empty.reset_parameters()
        torch.manual_seed(3)
        module.reset_parameters()
        assert same(list(module.parameters()), list(empty.parameters()))
        assert same(list(module.buffers()), list(empty.buffers()))
    torch.manual_seed(5)
    drawn = nvfp4.torch.LayerNormMLP(64, 96)
    torch.manual_seed(5)
    weights = [torch.nn.init.kaiming_uniform_(torch.empty(*shape), a=5**0.5) for shape in ((96, 64), (64, 96))]
    assert same(weights, [drawn.fc1_weight, drawn.fc2_weight])


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed_scaling", "high_precision"])
def test_shapes_without_numbers(recipe):
    with torch.device("meta"):
        for module, args in layers(recipe=recipe):
            x = torch.empty(32, 64, requires_grad=True)
            y = module(x, *args)
            y.sum().backward()
            assert y.is_meta and y.shape == (32, 64) and x.grad.shape == x.shape
            assert all(p.grad.shape == p.shape for p in module.parameters())


def test_modules_say_what_they_are():
    texts = [repr(module) for module, _ in layers()]
    formats = "input=nvfp4(hadamard), weight=nvfp4(16x16), grad_output=nvfp4(hadamard, stochastic)"
    assert texts[0] == f"Linear(in_features=64, out_features=64, bias=True, {formats})"
    assert texts[1] == (
        f"LayerNormLinear(in_features=64, out_features=64, bias=True, normalization=LayerNorm, eps=1e-05, {formats})"
    )
    assert texts[2].startswith("LayerNormMLP(hidden_size=64, ffn_hidden_size=96, bias=True, normalization=LayerNorm, activation=gelu")
    assert texts[-1] == f"GroupedLinear(num_gemms=2, in_features=64, out_features=64, bias=True, {formats})"


def test_results_are_no_views():
    for module, args in layers():
        for shape in ((32, 64), (1, 32, 64), *(() if args else ((3, 11, 64), (5, 64), (64,)))):
            y = module(torch.randn(shape), *args)
            assert not y._is_view() and y.shape == shape
            y += 1
            y.sum().backward()


def test_an_operation_never_gives_its_input_back():
    x = torch.randn(32, 64)
    for spec in ("high-precision", "high-precision / high-precision from row", "high-precision / mxfp8"):
        for directions in ("row", "column", "both"):
            for part in _partly(x, spec, directions, {}, {})[0]:
                assert part.data_ptr() != x.data_ptr(), (spec, directions)

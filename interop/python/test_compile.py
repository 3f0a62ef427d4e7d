"""Compiled modules: one graph for every number of tokens, with eager's numbers; sizes as formulas; exported models."""

import contextlib
import io
import shutil

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.utils
import torch._inductor.config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4 import _nvfp4
from nvfp4.torch import _ops, _sizes

RECIPES = nvfp4.Recipe.presets()
# Those of presets, and others that a rule can name.
SPECS = {spec for name in RECIPES for _, spec, _ in nvfp4.Plan(nvfp4.Recipe(name), [("fc", "linear")]).entries} | {
    "nvfp4", "nvfp4(row-scaled)", "nvfp4(row-scaled) / nvfp4", "mxfp8 / nvfp4 from row", "fp8 / mxfp8", "mxfp8 / fp8-delayed",
    "fp8-block / nvfp4(16x16)", "mxfp8(32x32)", "high-precision(bf16)", "high-precision / nvfp4", "high-precision / high-precision(f16)",
}  # fmt: skip
# Gradients without random numbers, which a compiler may draw in another order than eager torch.
NEAREST = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')
SIZES = (0, 1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 256, 300)
# Multiples of the alignment of every recipe, and other numbers.
TOKENS = (128, 256, 384, 77, 512, 130, 640)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@contextlib.contextmanager
def once_compiled():
    """Inside, a second compilation is an error, and inductor draws eager's random numbers."""
    with torch._dynamo.config.patch(error_on_recompile=True), torch._inductor.config.patch(fallback_random=True):
        yield


def step(module, x, *args):
    """Output and gradients of one step. The gradient of the output has small integers, whose sums are exact in any order."""
    torch.manual_seed(7)
    module.zero_grad()
    y = module(x, *args)
    y.backward((torch.arange(y.numel()) % 7 - 3).reshape(y.shape).to(y.dtype))
    found = [y.detach(), *(p.grad for p in module.parameters()), *([x.grad] if x.requires_grad else [])]
    x.grad = None
    return found


def same(a, b):
    return len(a) == len(b) and all(torch.equal(left, right) for left, right in zip(a, b))


@pytest.mark.parametrize("spec", sorted(SPECS))
def test_formulas_give_the_sizes_of_arrays(spec):
    for directions in ("row", "column", "both"):
        for shape in [*((rows, cols) for rows in SIZES for cols in SIZES), (2, 3, 33), (5,)]:
            row, column = nvfp4.layout(spec, directions, shape, "bfloat16")
            assert _sizes.arrays(spec, directions, shape, "bfloat16") == row + column, (directions, shape)
        for rows, cols in ((0, 16), (1, 40), (17, 33), (130, 258)):
            rows = 16 * rows if "hadamard" in spec else rows  # the transform takes whole blocks
            x = torch.randn(rows, cols)
            drawn = dict(seed=0, offset=0) if "stochastic" in spec else {}
            names = {"both": "scale", "row": "scale", "column": "column_scale"}
            scales = {names[part]: 1.0 for part in nvfp4.Delayed.parts(spec)}
            q = nvfp4.Quantizer(spec=spec, directions=directions).observe(x, **drawn, **scales)[0]
            made = [(str(part.dtype).removeprefix("torch."), list(part.shape)) for part in _ops._parts(q)]
            assert _sizes.arrays(spec, directions, (rows, cols), "float32") == made, (directions, rows, cols)


def test_formulas_give_the_sizes_of_blocks():
    specs = [spec for spec in sorted(SPECS) if "high-precision" not in spec]
    for spec, other in zip(specs, [*specs[1:], specs[0]]):
        text = f"{spec} | {other} | nvfp4 | precise precise precise"
        for tokens in SIZES:
            for features in SIZES:
                for after in ("trained", "trained keep", "frozen", "frozen keep", "evaluated", "evaluated keep"):
                    sizes = _nvfp4._linear_blocks(f"{text} | {after}", tokens, features, 48)
                    made = _sizes.linear_blocks(f"{text} | {after}", tokens, features, 48)
                    assert made == [size for size in sizes if size is not None], (spec, after, tokens, features)


@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_is_for_every_number_of_tokens(recipe, how):
    if how == "inductor" and shutil.which("g++") is None:
        pytest.skip("g++: inductor compiles for the CPU with it")
    torch.manual_seed(0)
    module, backend = nvfp4.torch.Linear(64, 48, recipe=recipe), "inductor" if how == "inductor" else "aot_eager"
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=None if how == "mark_dynamic" else True)
    with once_compiled():
        for tokens in TOKENS:
            x = torch.randn(tokens, 64, requires_grad=True)
            eager = step(module, x)
            if how == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 0)
            assert same(eager, step(compiled, x)), tokens


MODULES = {
    "LayerNormLinear": (nvfp4.torch.LayerNormLinear, (64, 48)),
    "LayerNormMLP": (nvfp4.torch.LayerNormMLP, (64, 96)),
    "GroupedLinear": (nvfp4.torch.GroupedLinear, (3, 64, 48)),
}


@pytest.mark.parametrize("recipe", [NEAREST, "delayed_scaling", "mxfp8_fwd_high_precision_bwd"], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_one_graph_of_every_module(name, recipe):
    torch.manual_seed(0)
    kind, sizes = MODULES[name]
    module = kind(*sizes, recipe=recipe)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with once_compiled():
        for number, tokens in enumerate((96, 32, 128, 21, 160)):
            x = torch.randn(tokens, 2 + number, 64, requires_grad=True)
            splits = ([tokens, 3, x.numel() // 64 - tokens - 3],) if name == "GroupedLinear" else ()
            assert same(step(module, x, *splits), step(compiled, x, *splits)), tokens


def test_a_graph_in_evaluation():
    module = nvfp4.torch.Linear(64, 48)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with once_compiled(), torch.no_grad():
        for tokens in TOKENS:
            x = torch.randn(tokens, 64)
            assert torch.equal(module(x), compiled(x))


FOLLOWING = {
    "Linear": (lambda: te.Linear(64, 48), ()),
    "LayerNormLinear": (lambda: te.LayerNormLinear(64, 48), ()),
    "LayerNormMLP": (lambda: te.LayerNormMLP(64, 96), ()),
    "GroupedLinear": (lambda: te.GroupedLinear(2, 64, 48), ([48, 16],)),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_modules_that_follow_regions_are_one_graph_for_each_recipe(name):
    module, args = FOLLOWING[name][0](), FOLLOWING[name][1]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x, graphs = torch.randn(64, 64, requires_grad=True), torch._dynamo.utils.counters["stats"]
    recipes = {"high precision": dict(enabled=False), "rules": dict(recipe=NEAREST), "mxfp8": dict(recipe="mxfp8")}
    for number, asked in enumerate(recipes.values(), 1):
        with te.autocast(**asked):
            found = step(compiled, x, *args)  # before any eager call
        with te.autocast(**asked):
            assert same(found, step(module, x, *args))
        assert graphs["unique_graphs"] == number
    # Regions are new ones each time, and so are recipes; what they stand for is known.
    with once_compiled():
        for asked in (dict(recipe=nvfp4.Recipe("mxfp8")), recipes["rules"], dict(enabled=False), recipes["mxfp8"]):
            with te.autocast(**asked):
                assert same(step(compiled, x, *args), step(module, x, *args))


def test_a_model_around_modules_that_follow_regions():
    model = torch.nn.Sequential(te.LayerNormMLP(64, 96), torch.nn.GELU(), te.Linear(64, 48))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with once_compiled():
        for tokens in (32, 64, 50):
            x = torch.randn(tokens, 64, requires_grad=True)
            with te.autocast(recipe=NEAREST):
                assert same(step(model, x), step(compiled, x))


def test_a_graph_outside_of_regions():
    module, x = te.Linear(64, 48), torch.randn(32, 64, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert same(step(compiled, x), step(module, x))
    with te.autocast():
        step(compiled, x)
    # Now such a call may be one that a backward pass repeats.
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"te.autocast\(enabled=False\) for high precision"):
        compiled(x)
    with te.autocast(enabled=False):
        assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("recipe", [NEAREST, te.MXFP8BlockScaling(), te.Float8CurrentScaling(), "float8_block_scaling"], ids=["rules", "mxfp8", "current", "blocks"])
def test_a_compiled_function_may_enter_regions(recipe):
    first, second, outside = te.Linear(64, 64), te.LayerNormMLP(64, 96), te.Linear(64, 48)
    modules = torch.nn.ModuleList([first, second, outside])

    def function(x):
        with te.autocast(recipe=recipe):
            y = first(x)
            with te.autocast(enabled=False):
                y = first(y)
            y = second(y)
        with te.autocast(recipe="mxfp8"):
            return first(y) + y

    def passes(called):
        x = torch.linspace(-2, 2, 32 * 64).reshape(32, 64).requires_grad_()
        modules.zero_grad()
        y = called(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in [*first.parameters(), *second.parameters()])]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = passes(compiled)  # before any eager call
    assert same(found, passes(function))
    with once_compiled():
        assert same(found, passes(compiled))
        with te.autocast(recipe="nvfp4"):  # one around it changes nothing
            assert same(found, passes(compiled))
    x = torch.randn(32, 64)
    assert torch.equal(outside(x), torch.nn.functional.linear(x, outside.weight, outside.bias))


def test_a_region_in_which_a_graph_breaks():
    model, twin, x = te.Linear(64, 64), te.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    twin.load_state_dict(model.state_dict())

    def function(module, x):
        with te.autocast(recipe=NEAREST):
            y = module(x)
            torch._dynamo.graph_break()
            return module(y)

    def delayed(module, x):
        with te.autocast(recipe="delayed_scaling"):
            return module(x)

    for called in (function, delayed, delayed):
        compiled = torch.compile(called, backend="aot_eager")
        found, expected = compiled(model, x), called(twin, x)
        assert torch.equal(found, expected)
        found.sum().backward(), expected.sum().backward()
    assert same(list(model.buffers()), list(twin.buffers()))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="delayed scaling counts its steps outside of graphs"):
        torch.compile(delayed, backend="aot_eager", fullgraph=True)(te.Linear(64, 64), x)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_backward_pass_repeats_a_compiled_call_in_its_recipe(reentrant):
    module, twin, x = te.Linear(64, 48), te.Linear(64, 48), torch.randn(32, 64, requires_grad=True)
    twin.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend="aot_eager")
    with te.autocast(recipe=NEAREST):
        expected = step(twin, x)
        y = checkpoint(compiled, x, use_reentrant=reentrant)
    y.backward((torch.arange(y.numel()) % 7 - 3).reshape(y.shape).to(y.dtype))
    assert same(expected, [y.detach(), *(p.grad for p in module.parameters()), x.grad])


def test_delayed_scaling_of_regions_breaks_the_graph():
    x = torch.randn(32, 64, requires_grad=True)
    module, twin = te.Linear(64, 48), te.Linear(64, 48)
    twin.load_state_dict(module.state_dict())
    compiled = torch.compile(twin, backend="aot_eager")
    for _ in range(3):
        with te.autocast(recipe="delayed_scaling"):
            eager = step(module, x)
        with te.autocast(recipe="delayed_scaling"):
            assert same(eager, step(compiled, x))
    assert same(list(module.buffers()), list(twin.buffers()))
    torch._dynamo.reset()
    whole = torch.compile(te.Linear(64, 48), backend="aot_eager", fullgraph=True)
    with te.autocast(recipe="delayed_scaling"), pytest.raises(torch._dynamo.exc.Unsupported, match="delayed scaling"):
        whole(x)


def operations(module, x, *args):
    """The operations that a step of a module and its evaluation call, with their arguments."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "nvfp4":
                seen.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Mode():
        step(module, x, *args)
        with torch.no_grad():
            module(x, *args)
    return [(func, *tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))) for func, args, kwargs in seen]


@pytest.mark.parametrize("tokens", [32, 20])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operations_keep_torchs_rules_and_make_new_tensors(recipe, tokens):
    # High precision as a whole is torch's own products.
    traced = recipe in ("nvfp4", "delayed_scaling", "nvfp4_row_scaled_fwd_mxfp8_bwd", "high_precision_fwd_mxfp8_bwd") and tokens == 20
    called = operations(nvfp4.torch.Linear(64, 48, recipe=recipe), torch.randn(tokens, 64, requires_grad=True))
    assert bool(called) == (recipe != "high_precision")
    for func, args, kwargs in called:
        checks = ("test_schema", "test_faketensor", *(["test_aot_dispatch_dynamic"] if traced else []))
        torch.library.opcheck(func, args, kwargs, test_utils=checks)
        given = [t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t.untyped_storage().data_ptr() for t in tree_leaves(func(*args, **kwargs)) if t.numel()]
        assert len({*made}) == len(made) and not {*made} & {*given}, func


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("recipe", ["nvfp4", "delayed_scaling", "mxfp8_fwd_high_precision_bwd"])
def test_an_exported_model_takes_every_batch(recipe, strict):
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)).eval()
    nvfp4.torch.convert_module(model, recipe)
    with torch.no_grad():
        exported = torch.export.export(model, (torch.randn(4, 9, 64),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch in (2, 5, 16):
        x = torch.randn(batch, 9, 64)
        with torch.no_grad():
            assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_an_exported_module_keeps_the_recipe_of_its_region(strict):
    module, x = te.LayerNormMLP(64, 96).eval(), torch.randn(21, 64)
    with te.autocast(recipe="nvfp4"), torch.no_grad():
        tokens = {"inp": {0: torch.export.Dim("tokens")}}
        exported = torch.export.export(module, (torch.randn(40, 64),), dynamic_shapes=tokens, strict=strict)
        expected = module(x)
    with torch.no_grad():
        assert torch.equal(exported.module()(x), expected)

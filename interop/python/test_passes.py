"""A layer's forward and backward pass as one operation each: what torch sees of them, and that they compute what their parts do."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nvfp4
import nvfp4.torch

RECIPES = nvfp4.Recipe.presets()
WHOLE = [name for name in RECIPES if nvfp4.torch.Linear(64, 64, recipe=name).formats.trained]


class Calls(TorchDispatchMode):
    """The names of the operations that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def step(module, x, dy):
    torch.manual_seed(7)
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(left, right) for left, right in zip(a, b))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_call_goes_through_the_dispatcher_where_something_watches_it(name):
    class Other(torch.Tensor):
        pass

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(str(func).removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    module, x, dy = nvfp4.torch.Linear(64, 32, recipe=name), torch.randn(32, 64), torch.randn(32, 32)
    expected = step(module, x, dy)
    with Calls() as calls:
        assert same(step(module, x, dy), expected)
    assert {"nvfp4.linear_codes", "nvfp4.linear_backward"} <= set(calls.names)
    names = []
    with Functions():
        assert same(step(module, x, dy), expected)
    assert "nvfp4.linear_codes" in names
    # torch's old tracer does not know such operations: it says so, and does not take results for constants.
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.jit.trace(module.eval(), x, check_trace=False)
    with torch.no_grad():
        assert torch.equal(torch.Tensor(module(x.as_subclass(Other))), module(x))
        assert module(x).shape == (32, 32) and nvfp4.torch.Linear(64, 32, device="meta", recipe=name)(x.to("meta")).is_meta


def in_parts(module):
    """The same layer from operations for each tensor and each product."""
    module.formats = module.formats._replace(trained="", evaluated="")
    module._products = module.products()
    return module


def test_the_usual_recipes_compute_a_pass_in_one_operation():
    assert {"nvfp4", "nvfp4_4over6", "nvfp4_row_scaled", "mxfp8", "current_scaling", "delayed_scaling", "float8_block_scaling"} <= set(WHOLE)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "current_scaling"])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)], ids=str)
def test_torch_dispatches_one_operation_for_a_pass(recipe, shape):
    # What a layer costs the host is the operations that it calls.
    module, x = nvfp4.torch.Linear(64, 48, recipe=recipe), torch.randn(shape, requires_grad=True)
    with Calls() as forward:
        y = module(x)
    drawn = ["aten.randint"] if recipe == "nvfp4" else []
    assert forward.names == [*drawn, "nvfp4.linear"]
    with Calls() as backward:
        y.backward(torch.randn(y.shape))
    ours = [name for name in backward.names if name.startswith("nvfp4.")]
    assert ours == ["nvfp4.linear_backward"] and "aten.copy_" not in backward.names
    # The codes of the weight serve until it changes.
    with torch.no_grad(), Calls() as evaluated:
        module(x)
    assert evaluated.names == ["nvfp4.linear_codes"]
    with torch.no_grad():
        module.weight.mul_(2)
        with Calls() as changed:
            module(x)
    assert changed.names == ["nvfp4.linear"]


@pytest.mark.parametrize("recipe", WHOLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pass_is_its_parts(recipe, dtype):
    torch.manual_seed(0)
    whole, parts = (nvfp4.torch.Linear(64, 48, recipe=recipe, dtype=dtype) for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    in_parts(parts)
    strided = torch.randn(64, 128).to(dtype).t()[:, ::1]
    for x in (torch.randn(128, 64).to(dtype), strided, torch.randn(2, 64, 64).to(dtype), torch.randn(5, 64).to(dtype)):
        dy = torch.randn(*x.shape[:-1], 48).to(dtype)
        for given in (dy, dy.transpose(0, -2).contiguous().transpose(0, -2), dy[..., :1].expand(dy.shape)):
            assert same(step(whole, x, given), step(parts, x, given))
        with torch.no_grad():
            assert torch.equal(whole(x), parts(x))
        for layer in (whole, parts):
            nvfp4.torch.update_scales(layer)
    assert same(list(whole.state_dict().values()), list(parts.state_dict().values()))


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_gradients_that_nobody_wants_are_not_made(frozen):
    for recipe in ("nvfp4", "delayed_scaling"):
        module, x = nvfp4.torch.Linear(64, 48, recipe=recipe), torch.randn(32, 64)
        expected = step(module, x, torch.ones(32, 48))
        module.zero_grad()
        if frozen != "input":
            getattr(module, frozen).requires_grad_(False)
        x.requires_grad_(frozen != "input")
        torch.manual_seed(7)
        module(x).backward(torch.ones(32, 48))
        for name, grad, all_of_them in zip(("input", "weight", "bias"), (x.grad, module.weight.grad, module.bias.grad), expected[1:]):
            assert grad is None if name == frozen else torch.equal(grad, all_of_them), name


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "current_scaling"])
def test_what_is_kept_for_the_backward_pass(recipe):
    kept = []
    module, x = nvfp4.torch.Linear(512, 256, recipe=recipe), torch.randn(1024, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    blocks = [tensor for tensor in kept if tensor.dtype == torch.uint8]
    # The column directions of x and the weight, and the place of the random numbers.
    assert len(blocks) == 2 and len(kept) == (3 if recipe == "nvfp4" else 2)
    each = {"nvfp4": 0.5625, "mxfp8": 1 + 1 / 32, "current_scaling": 1}[recipe]
    for block, elements in zip(blocks, (1024 * 512, 512 * 256)):
        assert each * elements <= block.numel() <= each * elements + 1024


def test_high_precision_keeps_what_it_was_given():
    kept = []
    module, x = nvfp4.torch.Linear(64, 48, recipe="high_precision"), torch.randn(32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = module(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), module.weight.data_ptr()]
    y.sum().backward()
    with torch.no_grad():
        assert torch.equal(module(x), torch.mm(x, module.weight.t()) + module.bias)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 33])
def test_any_number_of_tokens(tokens):
    for recipe in WHOLE:
        module, x = nvfp4.torch.Linear(64, 48, recipe=recipe), torch.randn(tokens, 64)
        y, dx, dw, db = step(module, x, torch.ones(tokens, 48))
        assert (y.shape, dx.shape, dw.shape, db.shape) == ((tokens, 48), (tokens, 64), (48, 64), (48,))
    assert nvfp4.torch.Linear(64, 48)(torch.randn(64)).shape == (48,)


def test_the_operations_keep_torchs_rules():
    x, weight, bias, dy = torch.randn(32, 64), torch.randn(48, 64), torch.randn(48), torch.randn(32, 48)
    for recipe, scales, watched in (("nvfp4", 0, ""), ("mxfp8", 0, "fc:{}"), ("delayed_scaling", 4, "fc:{}")):
        formats = nvfp4.torch.Linear(64, 48, recipe=recipe).formats
        given = [torch.ones(1), None, torch.ones(1), None][:scales]
        for text in (formats.trained, formats.evaluated):
            torch.library.opcheck(torch.ops.nvfp4.linear, (x, weight, bias, text, given, watched))
        _, kept_x, kept_weight, *_ = torch.ops.nvfp4.linear(x, weight, bias, formats.trained, given, watched)
        offset = torch.tensor([12]) if recipe == "nvfp4" else None
        for wanted in ((torch.float32, torch.bfloat16), (None, torch.float32), (torch.float16, None)):
            args = (dy, kept_x, kept_weight, formats.trained, 64, *wanted, 0, offset, given[:2], watched)
            torch.library.opcheck(torch.ops.nvfp4.linear_backward, args)


def test_what_does_not_fit_is_refused():
    formats = nvfp4.torch.Linear(64, 48).formats
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    with pytest.raises(ValueError, match="formats: expected 'input | weight"):
        torch.ops.nvfp4.linear(x, weight, None, "nvfp4", [], "")
    with pytest.raises(ValueError, match="scales: expected 4 or none, got 1"):
        torch.ops.nvfp4.linear(x, weight, None, formats.trained, [None], "")
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16 elements, got torch.float64"):
        torch.ops.nvfp4.linear(x.double(), weight, None, formats.trained, [], "")
    with pytest.raises(ValueError, match="63"):
        torch.ops.nvfp4.linear(x[:, :63], weight, None, formats.evaluated, [], "")
    _, kept_x, kept_weight = torch.ops.nvfp4.linear(x, weight, None, formats.trained, [], "")
    with pytest.raises(ValueError, match="block of a direction"):
        torch.ops.nvfp4.linear_backward(
            torch.randn(32, 48), kept_x[1:], kept_weight, formats.trained, 64, None, torch.float32, 0, torch.tensor([1]), [], ""
        )

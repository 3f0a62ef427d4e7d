"""Operations under TransformerEngine's names, against torch's and the modules of ``nvfp4.te``."""

import pytest
import torch
from torch.nn import functional

import nvfp4.te as te
from nvfp4.te import ops

DELAYED = te.DelayedScaling(amax_history_len=4)
RECIPES = [None, te.MXFP8BlockScaling(), te.NVFP4BlockScaling(), DELAYED]


def results(module, x, recipe, *beside):
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *beside)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_linear_operations_are_the_modules(recipe):
    x = torch.randn(48, 64)
    layer = te.Linear(64, 96)
    whole, product, bias = ops.Linear(64, 96), ops.BasicLinear(64, 96), ops.Bias(96)
    whole.load_state_dict(layer.state_dict())
    product.load_state_dict({"weight": layer.weight.detach()})
    bias.load_state_dict({"bias": layer.bias.detach()})
    for _ in range(2):  # scales of delayed scaling move on
        for module in (layer, whole, product, bias):
            module.zero_grad()
        expected = results(layer, x, recipe)
        assert same(expected, results(whole, x, recipe))
        y, dx, dw, db = results(ops.Sequential(product, bias), x, recipe)
        torch.testing.assert_close(y, expected[0])
        torch.testing.assert_close(dx, expected[1], rtol=0.1, atol=0.1 * dx.abs().max().item())
    if recipe is DELAYED:
        shown = product.get_quantizer("forward", 1).scale.item()
        assert shown == product.delayed.weight.scale.item() != 1


def test_codes_of_linear_operations():
    with te.quantized_model_init(recipe=te.MXFP8BlockScaling()):
        op = ops.Linear(64, 64)
    assert isinstance(op.weight, te.MXFP8Tensor)
    other = ops.Linear(64, 64)
    other.load_state_dict(op.state_dict())
    assert torch.equal(other.weight, op.weight.dequantize())


@pytest.mark.parametrize(
    "op, formula",
    [
        (ops.GELU(), lambda x: functional.gelu(x, approximate="tanh")),
        (ops.ReLU(), functional.relu),
        (ops.SReLU(), lambda x: functional.relu(x) ** 2),
        (ops.SiLU(), functional.silu),
        (ops.SwiGLU(), lambda x: functional.silu(x[:, :32]) * x[:, 32:]),
        (ops.GLU(), lambda x: torch.sigmoid(x[:, :32]) * x[:, 32:]),
        (ops.ConstantScale(0.5), lambda x: x / 2),
        (ops.Reshape((-1, 16)), lambda x: x.reshape(-1, 16)),
        (ops.Identity(), lambda x: x),
        (ops.Dropout(0.5).eval(), lambda x: x),
        (ops.L2Normalization(eps=0.0), lambda x: x / x.norm(dim=-1, keepdim=True)),
        (ops.LayerNorm(64), lambda x: functional.layer_norm(x, (64,))),
        (ops.RMSNorm(64), lambda x: functional.rms_norm(x, (64,), eps=1e-5)),
    ],
    ids=lambda of: type(of).__name__,
)
def test_operations_without_products(op, formula):
    x = torch.randn(48, 64)
    torch.testing.assert_close(op(x), formula(x))


def test_tensors_beside_the_input():
    x, extra = torch.randn(8, 4), torch.randn(8, 4)
    model = ops.Sequential(
        ops.ConstantScale(2.0), ops.MakeExtraOutput(), ops.AddExtraInput(), torch.nn.ReLU()
    )
    y, middle = model(x, extra)
    assert torch.equal(middle, 2 * x) and torch.equal(y, functional.relu(2 * x + extra))
    with pytest.raises(ValueError, match="AddExtraInput: expected 1 tensors beside its input"):
        model(x)
    with pytest.raises(ValueError, match="1 tensors beside the input are not used"):
        model(x, extra, extra)


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_quantize_rounds_a_tensor_and_its_gradient(override):
    recipe = te.MXFP8BlockScaling(backward_override=override)
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
    op = ops.Quantize(forward=True, backward=True)
    assert op(x) is x, "outside of regions"
    with te.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy)
    assert isinstance(y, te.MXFP8Tensor) and torch.equal(y.dequantize(), quantizer(x.detach()).dequantize())
    assert torch.equal(x.grad, dy if override else quantizer(dy).dequantize())
    with pytest.raises(NotImplementedError, match="delayed scaling"), te.autocast(recipe=DELAYED):
        op(x)


def test_a_compiled_function_gives_the_numbers_of_codes():
    torch._dynamo.reset()
    op, x, found = ops.Quantize(forward=True, backward=True), torch.randn(32, 64), []
    for function in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        with te.autocast(recipe=te.MXFP8BlockScaling()):
            y = function(leaf)
        (y * x).sum().backward()
        found.append((y, leaf.grad))
    (codes, first), (numbers, second) = found
    assert type(numbers) is torch.Tensor and torch.equal(codes.dequantize(), numbers)
    assert torch.equal(first, second)


def test_codes_go_on_to_other_operations():
    recipe, x = te.MXFP8BlockScaling(), torch.randn(32, 64, requires_grad=True)
    model = ops.Sequential(ops.RMSNorm(64), ops.Quantize(), ops.Linear(64, 32), ops.GELU())
    with te.autocast(recipe=recipe):
        y = model(x)
    y.sum().backward()
    grads = [x.grad, model[0].weight.grad, model[2].weight.grad]
    x.grad = None
    model.zero_grad()
    with te.autocast(recipe=recipe):  # numbers of codes are quantized to the same codes
        codes = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(model[0](x)).dequantize()
        again = model[3](model[2](codes))
    again.sum().backward()
    assert torch.equal(y, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, [x.grad, model[0].weight.grad, model[2].weight.grad]))


def test_what_operations_do_not_take_is_named():
    with pytest.raises(NotImplementedError, match="userbuffers_options"):
        ops.BasicLinear(16, 16, userbuffers_options={})
    with pytest.raises(NotImplementedError, match="cache_quantized_input"):
        ops.GELU(cache_quantized_input=True)

"""Parameters that exist as codes, and codes of weights that serve until the weights change."""

import copy
import io

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch import QuantizedTensor, quantize_parameters, quantized_model_init
from workers import run

SPECS = ["nvfp4", "nvfp4(16x16)", "nvfp4(row-scaled)", "fp8", "mxfp8", "fp8-block", "fp8-block(128x128)"]
RECIPES = ["nvfp4", "nvfp4_4over6", "nvfp4_row_scaled", "mxfp8", "current_scaling", "float8_block_scaling"]


class Operations(TorchDispatchMode):
    """The names of our operations that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "nvfp4":
            self.names.append(function._schema.name.removeprefix("nvfp4::"))
        return function(*args, **(kwargs or {}))


def model_of(recipe, bias=True, **settings):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256, bias), torch.nn.GELU(), torch.nn.Linear(256, 128, bias))
    nvfp4.torch.convert_module(model, recipe)
    return quantize_parameters(model, **settings) if settings else model


def step(model, x, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Codes of weights that are kept.


def test_a_weight_is_quantized_once_per_step_of_the_optimizer():
    layer = nvfp4.torch.Linear(64, 32)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.randn(16, 64)
    with Operations() as seen:
        for _ in range(3):  # micro-batches
            layer(x).sum().backward()
        checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()
        with torch.no_grad():
            layer(x)
        optimizer.step()
        layer(x).sum().backward()
    forward = [name for name in seen.names if name != "linear_backward"]
    assert forward == ["linear", *["linear_codes"] * 5, "linear"]


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed_scaling"])
def test_kept_codes_are_those_of_the_weight(recipe):
    kept, fresh = model_of(recipe), model_of(recipe)
    x = torch.randn(32, 128, requires_grad=True)
    for seed in range(4):
        nvfp4.torch.weights_changed(fresh)
        assert same([step(kept, x, seed), *gradients(kept)], [step(fresh, x, seed), *gradients(fresh)])
        if seed == 2:
            for model in (kept, fresh):
                nvfp4.torch.update_scales(model)


def changes():
    def in_place(layer):
        with torch.no_grad():
            layer.weight.mul_(2)

    def optimizer_of_data(layer):
        class Data(torch.optim.Optimizer):
            def step(self):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.mul_(2)

        Data(layer.parameters(), {}).step()

    def state_dict(layer):
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})

    def another_parameter(layer):
        layer.weight = torch.nn.Parameter(2 * layer.weight.detach())

    def another_storage(layer):
        layer.weight.data = 2 * layer.weight.data

    def another_type(layer):
        layer.double().float()
        in_place(layer)

    def other_memory_at_the_same_address(layer):
        values = layer.weight.detach().numpy().copy()
        layer.weight.data = torch.from_numpy(values)
        layer(torch.randn(16, 64))
        values *= 2
        layer.weight.data = torch.from_numpy(values)

    def the_same_memory_transposed(layer):
        layer.weight.data = (2 * layer.weight.data).t().contiguous()
        layer(torch.randn(16, 64))
        layer.weight.data = layer.weight.data.t()

    def averages_that_come_and_go(layer):
        layer.weight.data.mul_(3)
        layer.eval()
        layer(torch.randn(16, 64))
        layer.weight.data.mul_(2 / 3)
        layer.train()

    def swapped(layer):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            layer.double().float()
            layer(torch.randn(16, 64))
            state_dict(layer)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def imagined(layer):
        in_place(layer)
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(torch.randn(16, 64))

    def another_process(layer):
        layer.share_memory()
        layer(torch.randn(16, 64))
        layer.weight.data.mul_(2)  # as it would

    def told(layer):
        layer.weight.data.mul_(2)
        nvfp4.torch.weights_changed(layer)

    return [
        in_place, optimizer_of_data, state_dict, another_parameter, another_storage, another_type,
        other_memory_at_the_same_address, the_same_memory_transposed, averages_that_come_and_go, swapped,
        imagined, another_process, told,
    ]  # fmt: skip


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_changes_are_seen(change):
    layer, x = nvfp4.torch.Linear(64, 64, bias=False), torch.randn(16, 64)
    before = layer(x).detach()
    change(layer)
    # A factor of two moves every scale by as much.
    assert torch.equal(layer(x), 2 * before)
    with torch.no_grad():
        assert torch.equal(layer(x), 2 * before)


def test_copies_and_pickles_keep_nothing():
    layer, x = nvfp4.torch.Linear(64, 32), torch.randn(16, 64)
    y = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other._kept[0]._held is None
        assert torch.equal(other(x), y)


def test_codes_of_inference_mode_do_not_reach_training():
    layer, x = nvfp4.torch.Linear(64, 32), torch.randn(16, 64)
    with torch.inference_mode():
        y = layer(x)
        assert torch.equal(layer(x), y)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_transformer_engines_first_micro_batch_has_new_weights():
    layer, x = te.Linear(64, 64, bias=False), torch.randn(16, 64)
    with te.autocast(recipe=te.NVFP4BlockScaling()):
        before = layer(x, is_first_microbatch=True).detach()
        layer.weight.data.mul_(2)  # nobody counts this
        assert torch.equal(layer(x, is_first_microbatch=False), before)
        assert torch.equal(layer(x, is_first_microbatch=True), 2 * before)


# Quantized parameters.


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantized_tensor_has_the_values_of_its_codes(spec, dtype):
    x = torch.randn(256, 128, dtype=dtype)
    made = QuantizedTensor.quantize(x, spec)
    expected = torch.as_tensor(nvfp4.Quantizer(spec=spec)(x).dequantize(dtype))
    assert made.shape == x.shape and made.dtype == dtype and made.device == x.device
    assert torch.equal(made.dequantize(), expected)
    assert torch.equal(made * 2, expected * 2) and torch.equal(made[3:5], expected[3:5])
    assert torch.equal(made.t() @ x, expected.t() @ x) and torch.equal(made.take(torch.tensor([0])), expected[0, :1])
    assert type(torch.zeros_like(made)) is torch.Tensor
    for other in (made.detach(), made.clone(), copy.deepcopy(made), made.to("cpu", copy=True), made.view(-1).view(256, 128)):
        assert type(other) is QuantizedTensor and torch.equal(other.dequantize(), expected)
    assert made.to(torch.float16).dtype is torch.float16 and spec in repr(made)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_compute_the_same_from_codes(recipe):
    plain, codes = model_of(recipe), model_of(recipe, masters=torch.float32)
    x = torch.randn(2, 128, 128, requires_grad=True)
    assert isinstance(codes[0].weight, torch.nn.Parameter) and isinstance(codes[0].weight, QuantizedTensor)
    results = []
    for model in (plain, codes):
        x.grad = None
        results.append([step(model, x), x.grad, *gradients(model)])
    assert same(*results) and type(codes[0].weight.grad) is torch.Tensor
    with torch.no_grad():
        assert torch.equal(plain(x), codes(x))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("foreach", [True, False])
def test_masters_train_as_weights_do(optimizer, foreach):
    plain, codes = model_of("nvfp4"), model_of("nvfp4", masters=torch.float32)
    optimizers = [optimizer(model.parameters(), 1e-2, foreach=foreach) for model in (plain, codes)]
    x = torch.randn(32, 128)
    for seed in range(3):
        for model, of in zip((plain, codes), optimizers):
            step(model, x, seed)
            of.step()
    assert torch.equal(codes[0].weight.master, plain[0].weight) and torch.equal(codes(x), plain(x))


def test_without_masters_the_decoded_values_change():
    model = model_of("nvfp4", masters=None, directions="both")
    weight = model[0].weight
    before = weight.dequantize()
    with torch.no_grad():
        weight.add_(torch.full_like(weight, 0.5))
    assert torch.equal(weight.dequantize(), QuantizedTensor.quantize(before + 0.5, weight.spec).dequantize())


def test_all_of_a_quantized_parameter_can_be_set():
    values = torch.randn(64, 64)
    for masters in (None, torch.float32):
        for change in (
            lambda w: w.copy_(values), lambda w: w.data.copy_(values), lambda w: w.detach().view(-1).copy_(values.view(-1)),
            lambda w: setattr(w, "data", values), lambda w: torch.nn.utils.vector_to_parameters(values.view(-1), [w]),
            lambda w: w.__setitem__(slice(None), values), lambda w: (w.zero_(), w.add_(values)),
        ):  # fmt: skip
            weight = quantize_parameters(nvfp4.torch.Linear(64, 64), masters=masters).weight
            with torch.no_grad():
                change(weight)
            assert torch.equal(weight.dequantize(), QuantizedTensor.quantize(values, weight.spec).dequantize())
            assert masters is None or torch.equal(weight.master, values)
        assert not weight.detach().copy_(torch.zeros(64)).any()


def test_codes_can_be_shared():
    model, x = model_of("nvfp4", masters=torch.float32), torch.randn(16, 128)
    y = model(x)
    weight = model.share_memory()[0].weight
    assert weight.is_shared() and weight.column.is_shared() and weight.master.is_shared() and torch.equal(model(x), y)


@pytest.mark.parametrize("masters", [None, torch.float32])
def test_a_change_that_codes_do_not_follow_is_an_error(masters):
    for change in (
        lambda w: w[0].zero_(), lambda w: w.__setitem__((0, 0), 1.0), lambda w: w.t().zero_(),
        lambda w: w.chunk(2, 1)[0].mul_(2), lambda w: w.fill_diagonal_(1.0), lambda w: w.view(8, -1).zero_(),
    ):  # fmt: skip
        layer = quantize_parameters(nvfp4.torch.Linear(64, 64), masters=masters)
        with torch.no_grad():
            change(layer.weight)
        for use in (lambda: layer(torch.randn(16, 64)), lambda: layer.weight + 1, layer.state_dict, layer.weight.dequantize):
            with pytest.raises(RuntimeError, match="changed through a view of its values"):
                use()
        with torch.no_grad():
            layer.weight.copy_(torch.ones(64, 64))
        assert torch.equal(layer.weight.dequantize(), torch.ones(64, 64))


@pytest.mark.parametrize("directions", ["row", "both"])
@pytest.mark.parametrize("change", [lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.copy_(w * 2)])
def test_a_backward_pass_does_not_read_later_codes(directions, change):
    layer = quantize_parameters(nvfp4.torch.Linear(64, 64), directions=directions)
    y = layer(torch.randn(16, 64, requires_grad=True))
    with torch.no_grad():
        change(layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_cannot_be_a_quantized_parameter_is_refused():
    for spec, message in [("fp8-delayed", "earlier steps"), ("nvfp4(stochastic)", "nearest"), ("high-precision", "nearest")]:
        with pytest.raises(ValueError, match=message):
            QuantizedTensor.quantize(torch.randn(32, 32), spec)
    with pytest.raises(ValueError, match="matrix"):
        QuantizedTensor.quantize(torch.randn(2, 32, 32), "nvfp4")
    with pytest.raises(ValueError, match="^linear: "):
        quantize_parameters(nvfp4.torch.Linear(32, 32, recipe="delayed_scaling"))


def test_state_dicts_have_codes_and_load_everywhere():
    codes = model_of("nvfp4", masters=torch.float32)
    step(codes, torch.randn(32, 128))
    torch.optim.SGD(codes.parameters(), 0.1).step()
    file = io.BytesIO()
    torch.save(codes.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    x = torch.randn(16, 128)
    for settings in ({"masters": torch.float32}, {"directions": "both"}, {"directions": "row"}):
        other = model_of("nvfp4", **settings)
        other.load_state_dict(state)
        assert torch.equal(other(x), codes(x))
    plain = model_of("nvfp4")
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, codes[0].weight.dequantize())
    codes.load_state_dict(plain.state_dict())  # and back: values are quantized
    assert torch.equal(codes[0].weight.master, plain[0].weight)


def test_a_layer_can_begin_as_codes():
    with quantized_model_init(directions="row"):
        layers = [
            nvfp4.torch.Linear(64, 64), nvfp4.torch.LayerNormLinear(64, 64), nvfp4.torch.LayerNormMLP(64, 128),
            nvfp4.torch.GroupedLinear(2, 64, 64),
        ]  # fmt: skip
        with quantized_model_init(enabled=False):
            plain = nvfp4.torch.Linear(64, 64)
    assert type(plain.weight) is torch.nn.Parameter
    for layer in layers:
        weights = [getattr(layer, name) for name in layer.weights()]
        assert weights and all(type(weight) is QuantizedTensor and weight.directions == "row" for weight in weights)
        x = torch.randn(32, 64, requires_grad=True)
        y = layer(x, [16, 16]) if isinstance(layer, nvfp4.torch.GroupedLinear) else layer(x)
        y.sum().backward()
        assert x.grad is not None and all(weight.grad is not None for weight in weights)


@pytest.mark.parametrize("directions", ["row", "both"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_adapters_train_beside_frozen_codes(recipe, directions):
    layer = nvfp4.torch.Linear(64, 64, recipe=recipe)
    quantize_parameters(layer, directions=directions, requires_grad=False)
    down, up = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 64, bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    with Operations() as seen:
        (layer(x) + up(down(x))).square().sum().backward()
    assert layer.weight.grad is None and down.weight.grad is not None and x.grad is not None
    # Forward and dx from codes, and no column direction of x.
    assert seen.names == ["linear_codes", "linear_backward" if directions == "both" else "dequantize_block"]
    # A frozen weight in high precision does not need it either.
    plain = nvfp4.torch.Linear(64, 64, recipe=recipe)
    plain.weight.requires_grad_(False)
    y = plain(x)
    saved = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None and tensor.dtype is torch.uint8]
    assert len({tensor.data_ptr() for tensor in saved}) == 1


def test_any_module_multiplies_by_codes():
    layer, x = torch.nn.Linear(64, 32), torch.randn(2, 8, 64, requires_grad=True)
    layer.weight = torch.nn.Parameter(QuantizedTensor.quantize(layer.weight, "nvfp4"))
    y, expected = layer(x), functional.linear(x, layer.weight.dequantize(), layer.bias)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight.dequantize())
    torch.testing.assert_close(layer.weight.grad, dy.reshape(-1, 32).t() @ x.reshape(-1, 64))


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_few_tokens_read_prepared_codes(tokens):
    """On a CPU that has an order of its own for them: the same product."""
    torch.manual_seed(3)
    layer = nvfp4.torch.Linear(96, 40, recipe="nvfp4", dtype=torch.bfloat16)
    quantize_parameters(layer, directions="row", requires_grad=False)
    plain = torch.nn.Linear(96, 40, dtype=torch.bfloat16)
    plain.weight = torch.nn.Parameter(QuantizedTensor.quantize(plain.weight, "nvfp4"), requires_grad=False)
    x = torch.randn(tokens, 96, dtype=torch.bfloat16)
    there = bool(torch.ops.nvfp4.prepare_block(layer.weight.row, layer.weight.spec, 40, 96))
    with torch.no_grad():
        for module in (layer, plain):
            y = module(x)
            assert (module.weight._prepared is not None) == (there and tokens <= 4)
            # A compiled product takes what is there, and here it is not.
            module.weight._prepared = None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                unprepared = module(x)
            assert module.weight._prepared is None
            assert torch.equal(y, unprepared) if module is layer else torch.allclose(y, unprepared, rtol=2**-7)
    if there and tokens == 1:
        layer.weight._prepared, layer.weight._prepared_at = torch.zeros(5, dtype=torch.uint8), layer.weight._versions()
        with torch.no_grad(), pytest.raises(ValueError, match="prepared weight"):
            layer(x)


def frozen(dtype=torch.bfloat16):
    torch.manual_seed(4)
    layer = torch.nn.Linear(96, 40, dtype=dtype)
    layer.weight = torch.nn.Parameter(QuantizedTensor.quantize(layer.weight, "nvfp4"), requires_grad=False)
    return layer


def test_compiled_products_read_the_prepared_codes_that_are_there():
    torch._dynamo.reset()
    layer, x, read = frozen(), torch.randn(1, 96, dtype=torch.bfloat16), []

    def backend(graph, _):
        (call,) = [node for node in graph.graph.nodes if node.target is torch.ops.nvfp4.linear_codes.default]
        read.append(call.args[2] is not None)
        return graph

    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    with torch.no_grad():
        compiled(x)
        layer.weight.prepare()
        there = layer.weight._prepared is not None
        for _ in range(2):
            assert torch.equal(compiled(x), layer(x))
        assert read == [False, True][: 1 + there]
        # Other codes have none yet, whichever way they came.
        for change in (
            lambda new: layer.weight.copy_(new),
            lambda new: setattr(layer.weight, "data", new),
            lambda new: layer.weight.detach().copy_(new),
            torch.compile(lambda new: layer.weight.copy_(new), backend="aot_eager"),
        ):
            layer.weight.prepare()
            change(torch.randn(40, 96, dtype=torch.bfloat16))
            changed = compiled(x)
            # Decoded weights and the sum are rounded to bf16.
            left, right, bias = x.double(), layer.weight.dequantize().double().t(), layer.bias.double()
            bound = 2**-7 * (left.abs() @ right.abs() + bias.abs())
            assert ((changed - (left @ right + bias)).abs() <= bound).all()
            assert torch.allclose(changed, layer(x), rtol=2**-7)
        assert read == [False, True][: 1 + there]


def test_changes_that_torch_does_not_count_are_said():
    """As those of a function that Inductor compiled: the codes are new, their version is not."""
    layer, x = frozen(), torch.randn(1, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        other = QuantizedTensor.quantize(torch.randn(40, 96), "nvfp4")
        torch.autograd.graph.increment_version(layer.weight)
        with torch.autograd._unsafe_preserve_version_counter(layer.weight.row):
            layer.weight.row.copy_(other.row)
        with pytest.raises(RuntimeError, match="call nvfp4.torch.weights_changed"):
            layer(x)
        nvfp4.torch.weights_changed(layer)
        expected = functional.linear(x, torch.nn.Parameter(other, requires_grad=False).to(x.dtype), layer.bias)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_codes_in_the_order_of_all_devices(strict):
    layer, x = frozen(dtype=torch.float32), torch.randn(1, 96)
    with torch.no_grad():
        y = layer(x)  # which prepares them
        program = torch.export.export(layer, (x,), strict=strict)
        for made in (program, program.run_decompositions()):
            file = io.BytesIO()
            torch.export.save(made, file)
            file.seek(0)
            loaded = torch.export.load(file).module()
            assert torch.allclose(loaded(x), y, rtol=1e-6)
            assert not any("original2" in name for name, _ in loaded.named_parameters())


@pytest.mark.parametrize("settings", [{"directions": "both"}, {"directions": "row"}, {"masters": torch.float32}], ids=str)
def test_codes_compile(settings):
    torch._dynamo.reset()
    # A compiler may draw random numbers in another order.
    nearest = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')
    model, x = model_of(nearest, **settings), torch.randn(32, 128)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for of in (model, compiled):
        results.append([step(of, x), *(gradient.clone() for gradient in gradients(model))])
    assert same(*results)


# Gradients of Megatron.


@pytest.mark.parametrize("recipe", ["nvfp4", "high_precision", "mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled"])
def test_gradients_go_into_main_grad(recipe):
    layer = nvfp4.torch.Linear(64, 64, recipe=recipe, dtype=torch.bfloat16)
    layer.fuse_wgrad_accumulation = True
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    step(layer, x)
    expected = layer.weight.grad.float()
    layer.weight.main_grad = None  # not there yet
    assert step(layer, x) is not None and torch.equal(layer.weight.grad.float(), expected)
    layer.weight.grad, layer.weight.main_grad = None, torch.ones(64, 64)
    step(layer, x)
    assert layer.weight.grad is None
    # In float32, of which the gradient above is a rounding.
    rounded = (layer.weight.main_grad - 1).bfloat16().float()
    torch.testing.assert_close(rounded, expected, rtol=2**-7, atol=2**-7)
    layer.weight.grad_added_to_main_grad = False
    step(layer, x)
    assert layer.weight.grad_added_to_main_grad and not layer.weight.grad.any()


# Shards.


def of_codes(directions, masters, requires_grad=None):
    nearest = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')
    return model_of(nearest, directions=directions, masters=masters, requires_grad=requires_grad)


def worker(rank, number):
    torch.manual_seed(0)
    x = torch.randn(32, 128)
    for directions, masters in (("both", torch.float32), ("both", None), ("row", torch.float32)):
        whole, model = of_codes(directions, masters), of_codes(directions, masters)
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        local = model[0].weight.to_local()
        assert type(local) is QuantizedTensor and local.shape == (128, 128) and local.directions == directions
        expected = whole[0].weight.dequantize()[128 * rank : 128 * rank + 128]
        assert torch.equal(local.dequantize(), expected)
        # Workers see the same tokens, so gradients are those of one.
        optimizers = [torch.optim.AdamW(of.parameters(), 1e-2) for of in (whole, model)]
        for seed in range(3):
            torch.testing.assert_close(step(whole, x, seed), step(model, x, seed))
            for of in optimizers:
                of.step()
            model[0].unshard()
            gathered, expected = model[0].weight, whole[0].weight
            assert type(gathered) is QuantizedTensor
            # Sums of gradients are rounded otherwise, and values on the edge between codes may move.
            assert (gathered.dequantize() != expected.dequantize()).float().mean() < 1e-3
            model[0].reshard()
        state = model.state_dict()
        before = model(x)
        model.load_state_dict(state)
        assert torch.equal(model(x), before)
    # Changes of plain shards are seen too, though gathers are not counted.
    whole, model = model_of("nvfp4"), model_of("nvfp4")
    for layer in (model[0], model[2], model):
        fully_shard(layer, reshard_after_forward=True)
    for _ in range(3):
        for of in (whole, model):
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter.mul_(2)
        torch.testing.assert_close(whole(x), model(x))
    frozen, whole = of_codes("row", None, False), of_codes("row", None, False)
    fully_shard(frozen)
    given = x.clone().requires_grad_()
    frozen(given).sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(frozen(x), whole(x))
    odd = torch.nn.Sequential(nvfp4.torch.Linear(64, 48))
    quantize_parameters(odd)
    with pytest.raises(ValueError, match="cut through blocks|do not divide"):
        fully_shard(odd)
    # Any operation on a DTensor of codes computes on their values.
    weight = whole[0].weight.detach()
    mesh = init_device_mesh("cpu", (2,))
    part = weight.split(128)[rank]
    spread = DTensor.from_local(part, mesh, [Shard(0)])
    y = functional.linear(DTensor.from_local(x, mesh, [Replicate()]), spread)
    torch.testing.assert_close(y.full_tensor(), x @ weight.dequantize().t())


def test_codes_are_sharded_and_gathered_as_codes(tmp_path):
    run(2, tmp_path, worker)

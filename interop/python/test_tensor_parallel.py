"""Tensor and sequence parallelism: two and four processes, over gloo, against one process."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as styles

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch import _composed
from nvfp4.torch._quantized import QuantizedTensor
from workers import NEAREST, Counted, case, close, documented, evaluated, gathered_codes, run

EACH = 32  # tokens of a worker


# DTensors.


def rounded(x, bits):
    """A tensor of multiples of 2⁻ᵇⁱᵗˢ. Sums of products of such numbers need no rounding, so that
    torch's products of parts are parts of its products on every machine. Otherwise the last bit of
    one may be another, and a code that is made of it too.
    """
    return (x * 2**bits).round() / 2**bits


def model_of(recipe):
    torch.manual_seed(0)
    layers = [nvfp4.torch.Linear(*sizes, recipe=recipe) for sizes in ((64, 128), (128, 64))]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    with torch.no_grad():  # the largest values are one worker's alone
        model[0].weight[:16] *= 4
        model[2].weight[:, :16] *= 3
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter, 9))
    return model


def parallelized(recipe, mesh, kinds, sequence, dtype=torch.float32):
    colwise, rowwise = kinds
    plan = {"0": colwise(**({"input_layouts": Shard(1)} if sequence else {})),
            "2": rowwise(**({"output_layouts": Shard(1)} if sequence else {}))}  # fmt: skip
    return styles.parallelize_module(model_of(recipe).to(dtype), mesh, plan)


def numbers(number):
    torch.manual_seed(7)
    x = torch.randn(2, EACH * number, 64) * torch.linspace(0.1, 3, EACH * number)[:, None]
    return rounded(x, 3), torch.randn(2, EACH * number, 64)


def by_dtensors(rank, number, mesh, recipes):
    x, dy = numbers(number)
    theirs = (styles.ColwiseParallel, styles.RowwiseParallel)
    for recipe in recipes:
        for kinds, sequence in ((theirs, False), (theirs, True), (OURS, True)):
            with case(recipe, kinds, sequence):
                by_layout(rank, mesh, recipe, kinds, sequence, x, dy)


def by_layout(rank, mesh, recipe, kinds, sequence, x, dy):
    alone, model = model_of(recipe), parallelized(recipe, mesh, kinds, sequence)
    mine = slice(rank * EACH, rank * EACH + EACH) if sequence else slice(None)
    whole, part = x.clone().requires_grad_(), x[:, mine].clone().requires_grad_()
    expected, y = alone(whole), model(part)
    expected.backward(dy)
    y.backward(dy[:, mine])
    close(y, expected[:, mine])
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    if recipe == "nvfp4" or recipe == "nvfp4_row_scaled":  # gradients are rounded stochastically
        assert all(torch.isfinite(g).all() for g in gradients.values())
        return
    close(part.grad, whole.grad[:, mine])
    for name, parameter in alone.named_parameters():
        close(gradients[name], parameter.grad)
        if recipe is NEAREST and "weight" in name:
            # The same codes, and sums of NVFP4 products do not depend on an order.
            assert torch.equal(gradients[name], parameter.grad), (name, sequence)
    with torch.no_grad():
        close(model.eval()(part), alone.eval()(whole)[:, mine])


# What docs/scale.md says of tokens that travel: a recipe for each row of the table.
ROWS = nvfp4.Recipe.from_toml(
    '[[rule]]\nslot = ["input", "grad_output"]\nspec = "nvfp4(row-scaled)"\n[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"'
)
TRAVELLING = {
    "bfloat16": "high_precision",
    "FP8, one scale": "current_scaling",
    "MXFP8": "mxfp8",
    "NVFP4": NEAREST,
    "NVFP4, row-scaled": ROWS,
}
OURS = (nvfp4.torch.ColwiseParallel, nvfp4.torch.RowwiseParallel)


def travels(rank, number, mesh):
    """Tokens travel as codes: x of the first layer in both passes, dy of the second one backward."""
    x, dy = (of.bfloat16() for of in numbers(number))
    mine, table = slice(rank * EACH, rank * EACH + EACH), documented("Tensor and sequence parallelism")
    assert table.keys() == TRAVELLING.keys()
    for name, recipe in TRAVELLING.items():
        model = parallelized(recipe, mesh, OURS, True, torch.bfloat16)
        of_x, of_dy = (evaluated(formula, T=2 * EACH, K=64) for formula in table[name])
        with case(name), pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            y = model(x[:, mine])
            # In bfloat16 what arrived is kept; codes are gathered again, in the other direction.
            forward = counted.taken()
            scales = 4 * 2 * EACH if recipe is ROWS else 0
            assert forward == (of_x if name == "bfloat16" else (of_x + scales) / 2)
            # Of each product one for x and the weight, in both directions.
            needed = 0 if recipe in ("high_precision", "mxfp8") else 2
            assert len(counted.reductions) == needed
            y.backward(dy[:, mine])
            assert counted.taken() == of_x + of_dy - forward
            assert len(counted.reductions) == 2 * needed
    with pytest.MonkeyPatch.context() as patch:
        # Row-scaled tokens have scales of their own: nothing is agreed on but weights.
        counted = Counted(patch)
        first = parallelized("nvfp4_row_scaled", mesh, OURS, True)[0].eval()
        with torch.no_grad():
            first(x[:, mine].float())
        assert counted.reductions == [1]


def kept(rank, number, mesh):
    """A weight is quantized once for the micro-batches of a step, until something changes it."""
    x, dy = numbers(number)
    mine = slice(rank * EACH, rank * EACH + EACH)
    by_argument = te.Linear(64, 128, parallel_mode="column", tp_group=dist.group.WORLD, device="cpu")
    for model in (parallelized(NEAREST, mesh, OURS, True), torch.nn.Sequential(by_argument)):
        weights = [p for p in model.parameters() if p.ndim == 2]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def quantized_in(work):
            """How many weights are quantized in some work."""
            done, quantize = [], _composed.quantize

            def counts(of, spec, *given):
                done.append("16x16" in spec)
                return quantize(of, spec, *given)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_composed, "quantize", counts)
                work()
            return sum(done) / 2  # once for its own amax, and once with that of all

        def passes(anew=False):
            """The gradients of two micro-batches."""
            optimizer.zero_grad()
            for part in (x[:, mine], 2 * x[:, mine]):
                if anew:
                    nvfp4.torch.weights_changed(model)
                with te.autocast(recipe=NEAREST):
                    model(part).square().mean().backward()
            return [getattr(p.grad, "full_tensor", lambda: p.grad)().clone() for p in model.parameters()]

        def agree():
            found = []
            assert quantized_in(lambda: found.append(passes())) == len(weights)
            assert quantized_in(lambda: found.append(passes())) == 0
            assert quantized_in(lambda: found.append(passes(anew=True))) == 2 * len(weights)
            assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found))
            return found[0]

        before = agree()
        optimizer.step()
        after = agree()
        assert not torch.equal(before[0], after[0])
        with torch.no_grad():
            for weight in weights:
                weight.mul_(2)
        agree()
        # A part that is written to through a state dict, as dcp.load writes, while nothing is said: with a pass
        # while the state dict is there, and without.
        for between in (True, False):
            state = {name: value for name, value in model.state_dict().items() if name.endswith("weight")}
            if between:
                passes()
            with torch.no_grad():
                for name in state:
                    getattr(state[name], "_local_tensor", state[name]).mul_(0.25)
            found = passes() if between else None
            state.clear()
            before, after = after, passes()
            assert not torch.equal(before[0], after[0])
            assert all(torch.equal(a, b) for a, b in zip(after, passes(anew=True)))
            assert found is None or all(torch.equal(a, b) for a, b in zip(found, after))
        # One worker that quantizes anew has others wait for nothing, and gets what it had.
        if rank == 0:
            nvfp4.torch.weights_changed(model)
        assert all(torch.equal(a, b) for a, b in zip(after, passes()))


def two(rank, number):
    mesh = init_device_mesh("cpu", (number,))
    gathered_codes(rank, number)
    travels(rank, number, mesh)
    kept(rank, number, mesh)
    by_dtensors(rank, number, mesh, (NEAREST, "nvfp4_row_scaled", "current_scaling", "mxfp8", "high_precision_fwd_mxfp8_bwd", "nvfp4"))


def test_dtensors_and_one_process_multiply_the_same_codes(tmp_path):
    run(2, tmp_path, two)


def sharded_twice(rank, number):
    """Two workers have parts of a weight each, of which two have shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, dy = numbers(2)
    alone, results = model_of(NEAREST), []
    part = slice(mesh["tp"].get_local_rank() * EACH, mesh["tp"].get_local_rank() * EACH + EACH)
    alone(x).backward(dy)
    for coded in (False, True):
        model = parallelized(NEAREST, mesh["tp"], OURS, True)
        if coded:
            assert [t.reason for t in nvfp4.torch.gather_codes(model, workers=2)] == [None, None]
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
        y = model(x[:, part])
        y.backward(dy[:, part])
        results.append([y, *(p.grad.full_tensor() for p in model.parameters())])
        model[0].unshard()
        local = model[0].weight.to_local()
        assert type(local) is (QuantizedTensor if coded else torch.Tensor)
        if coded:
            spec, rank_of = alone[0].formats.weight.spec, mesh["tp"].get_local_rank()
            expected = QuantizedTensor.quantize(alone[0].weight, spec).dequantize().chunk(2)[rank_of]
            assert torch.equal(local.dequantize(), expected), "the scale is that of all four parts"
    assert all(torch.equal(a, b) for a, b in zip(*results))
    for found, parameter in zip(results[1][1:], alone.parameters()):
        close(found, parameter.grad)


def four(rank, number):
    sharded_twice(rank, number)
    mesh = init_device_mesh("cpu", (number,))
    gathered_codes(rank, number)
    travels(rank, number, mesh)
    by_dtensors(rank, number, mesh, (NEAREST, "current_scaling"))
    by_arguments(rank, number, (NEAREST,))


def test_four_workers_too_and_fsdp2_with_them(tmp_path):
    run(4, tmp_path, four)


# TransformerEngine's arguments.


def layer_of(**settings):
    torch.manual_seed(0)
    return te.TransformerLayer(
        64, 128, 4, hidden_dropout=0, attention_dropout=0, set_parallel_mode=True, layer_number=1,
        device="cpu", activation="swiglu", **settings,
    )  # fmt: skip


def part_of(name, parameter, whole, rank, number):
    """A worker's part of a parameter; those of a gate and of what it gates are split apart."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    if name.endswith(("fc1_weight", "fc1_bias")):
        return torch.cat([half.chunk(number)[rank] for half in whole.chunk(2)])
    return whole.chunk(number, parameter.partition_dim)[rank]


def by_arguments(rank, number, recipes=(NEAREST, "delayed_scaling", None)):
    torch.manual_seed(7)
    x, dy = torch.randn(2, EACH * number, 2, 64)
    for recipe in recipes:
        for sequence, fused in ((False, True), (True, False)):
            given = {"fuse_qkv_params": fused, "num_gqa_groups": number}
            alone = layer_of(**given)
            module = layer_of(**given, tp_size=number, sequence_parallel=sequence)
            module.set_tensor_parallel_group(dist.group.WORLD)
            with torch.no_grad():
                for (name, whole), part in zip(alone.named_parameters(), module.parameters()):
                    part.copy_(part_of(name, part, whole, rank, number))
            mine = slice(rank * EACH, rank * EACH + EACH) if sequence else slice(None)
            for _ in range(2):
                of_all, of_mine = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
                made = []
                for layer, tokens, gradient in ((alone, of_all, dy), (module, of_mine, dy[mine])):
                    layer.zero_grad()
                    with te.autocast(enabled=recipe is not None, recipe=recipe):
                        made.append(layer(tokens))
                    made[-1].backward(gradient)
            close(made[1], made[0][mine])
            close(of_mine.grad, of_all.grad[mine])
            for (name, whole), part in zip(alone.named_parameters(), module.parameters()):
                found = part.grad.clone()
                if getattr(part, "sequence_parallel", False):  # of this worker's tokens
                    dist.all_reduce(found)
                close(found, part_of(name, part, whole.grad, rank, number))
            for name, buffer in module.named_buffers():
                if name.endswith("scale") and "core_attention" not in name:
                    close(buffer, alone.get_buffer(name))


def arguments(rank, number):
    column = te.LayerNormLinear(64, 64, parallel_mode="column", tp_group=dist.group.WORLD, sequence_parallel=True,
                                return_layernorm_output=True, return_layernorm_output_gathered=True)  # fmt: skip
    assert column.weight.shape == (64 // number, 64) and column.tp_group is dist.group.WORLD
    y, norm = column(torch.randn(EACH, 64))
    assert y.shape == (EACH * number, 64 // number) and norm.shape == (EACH * number, 64)
    (y.sum() + norm.sum()).backward()
    assert copy.deepcopy(column).tp_group is dist.group.WORLD
    again = pickle.loads(pickle.dumps(column))
    with pytest.raises(RuntimeError, match="set it with set_tensor_parallel_group"):
        again(torch.randn(EACH, 64))
    again.set_tensor_parallel_group(dist.group.WORLD)
    assert again(torch.randn(EACH, 64))[0].shape == y.shape
    # Tokens that are no whole blocks travel as they are.
    with te.autocast(recipe="nvfp4"):
        odd = torch.randn(12, 64, requires_grad=True)
        again(odd)[0].sum().backward()
    assert odd.grad is not None
    with pytest.raises(ValueError, match="unknown parallel_mode 'both'"):
        te.Linear(64, 64, parallel_mode="both")
    with pytest.raises(ValueError, match="out_features=65 does not divide among 2 workers"):
        te.Linear(64, 65, parallel_mode="column", tp_size=2)
    with pytest.raises(ValueError, match="expected a group of tp_size=3 workers, got 2"):
        te.Linear(64, 66, parallel_mode="column", tp_size=3).set_tensor_parallel_group(dist.group.WORLD)


def with_arguments(rank, number):
    by_arguments(rank, number)
    arguments(rank, number)


def test_the_arguments_of_transformer_engine(tmp_path):
    run(2, tmp_path, with_arguments)

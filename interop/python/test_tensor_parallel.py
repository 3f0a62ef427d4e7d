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
from nvfp4.torch._agree import Split
from nvfp4.torch._composed import quantized
from nvfp4.torch._formats import Format
from nvfp4.torch._parallel import gathered_arrays
from nvfp4.torch._quantized import QuantizedTensor
from workers import NEAREST, case, close, run

EACH = 32  # tokens of a worker


class Counted:
    """Counts the bytes that a worker gives to gathers, and the reductions of amaxes."""

    def __init__(self, patch):
        self.bytes = self.reductions = 0
        gather, reduce = dist.all_gather_into_tensor, dist.all_reduce

        def gathers(output, input, *args, **kwargs):
            self.bytes += input.nbytes
            return gather(output, input, *args, **kwargs)

        def reduces(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
            self.reductions += op == dist.ReduceOp.MAX
            return reduce(tensor, op, *args, **kwargs)

        patch.setattr(dist, "all_gather_into_tensor", gathers)
        patch.setattr(dist, "all_reduce", reduces)


# DTensors.


def rounded(x, bits):
    """A tensor of multiples of 2⁻ᵇⁱᵗˢ. Sums of products of such numbers need no rounding, so that
    torch's products of parts are parts of its products on every machine. Otherwise the last bit of
    one may be another, and a code that is made of it too.
    """
    return (x * 2**bits).round() / 2**bits


def model_of(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    nvfp4.torch.convert_module(model, recipe)
    with torch.no_grad():  # the largest values are one worker's alone
        model[0].weight[:16] *= 4
        model[2].weight[:, :16] *= 3
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter, 9))
    return model


def parallelized(recipe, mesh, kinds, sequence):
    colwise, rowwise = kinds
    plan = {"0": colwise(**({"input_layouts": Shard(1)} if sequence else {})),
            "2": rowwise(**({"output_layouts": Shard(1)} if sequence else {}))}  # fmt: skip
    return styles.parallelize_module(model_of(recipe), mesh, plan)


def numbers(number):
    torch.manual_seed(7)
    x = torch.randn(2, EACH * number, 64) * torch.linspace(0.1, 3, EACH * number)[:, None]
    return rounded(x, 3), torch.randn(2, EACH * number, 64)


def by_dtensors(rank, number, mesh):
    x, dy = numbers(number)
    theirs, ours = (styles.ColwiseParallel, styles.RowwiseParallel), (nvfp4.torch.ColwiseParallel, nvfp4.torch.RowwiseParallel)
    for recipe in (NEAREST, "nvfp4_row_scaled", "current_scaling", "mxfp8", "high_precision_fwd_mxfp8_bwd", "nvfp4"):
        for kinds, sequence in ((theirs, False), (theirs, True), (ours, True)):
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


def travels(rank, number, mesh):
    """Tokens travel as codes: two directions forward of x, two backward of dy, in 4.5 bits each."""
    x, dy = numbers(number)
    mine = slice(rank * EACH, rank * EACH + EACH)
    model = parallelized(NEAREST, mesh, (nvfp4.torch.ColwiseParallel, nvfp4.torch.RowwiseParallel), True)
    tokens = 2 * EACH
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        y = model(x[:, mine])
        assert counted.bytes == tokens * 64 * 9 // 16
        # x and the weight of each product: one for both directions of a tensor.
        assert counted.reductions == 4
        y.backward(dy[:, mine])
        assert counted.bytes == 4 * tokens * 64 * 9 // 16
        assert counted.reductions == 6
    with pytest.MonkeyPatch.context() as patch:
        # Row-scaled tokens have scales of their own: nothing is agreed on but weights.
        counted = Counted(patch)
        model = parallelized("nvfp4_row_scaled", mesh, (nvfp4.torch.ColwiseParallel, nvfp4.torch.RowwiseParallel), True)
        first = model[0].eval()
        with torch.no_grad():
            first(x[:, mine])
        assert counted.reductions == 1 and counted.bytes == tokens * (64 * 9 // 16 + 4)


def codes(rank, number):
    """Gathered codes are those of all tokens, code for code."""
    torch.manual_seed(1)
    whole = torch.randn(EACH * number, 64) * torch.linspace(0.1, 4, EACH * number)[:, None]
    mine = whole[rank * EACH : rank * EACH + EACH]
    for spec in ("nvfp4", "nvfp4(hadamard)", "nvfp4(row-scaled)", "fp8(e4m3)", "mxfp8(e4m3)"):
        format = Format.of(nvfp4.Quantizer(spec=spec, directions="both"))
        expected = quantized(whole, format)
        arrays = quantized(mine, format, group=Split((dist.group.WORLD,)))
        sides = {"row": slice(0, format.row), "column": slice(format.row, None)}
        for side, at in sides.items():
            found = gathered_arrays(arrays[at], spec, side, tuple(mine.shape), dist.group.WORLD)
            assert all(torch.equal(a, b) for a, b in zip(found, expected[at])), (spec, side)
        # Features that are split: a token's own scale is agreed on, too.
        part = quantized(whole.chunk(number, 1)[rank].contiguous(), format, group=Split((), (dist.group.WORLD,)))
        tensor = nvfp4.QuantTensor.from_parts(spec, (len(whole), 64 // number), row=part[: format.row])
        of_all = nvfp4.QuantTensor.from_parts(spec, whole.shape, row=expected[: format.row])
        assert torch.equal(tensor.dequantize(), of_all.dequantize().chunk(number, 1)[rank]), spec


def two(rank, number):
    mesh = init_device_mesh("cpu", (number,))
    codes(rank, number)
    travels(rank, number, mesh)
    by_dtensors(rank, number, mesh)


def test_dtensors_and_one_process_multiply_the_same_codes(tmp_path):
    run(2, tmp_path, two)


def sharded_twice(rank, number):
    """Two workers have parts of a weight each, of which two have shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, dy = numbers(2)
    kinds = (nvfp4.torch.ColwiseParallel, nvfp4.torch.RowwiseParallel)
    alone, results = model_of(NEAREST), []
    part = slice(mesh["tp"].get_local_rank() * EACH, mesh["tp"].get_local_rank() * EACH + EACH)
    alone(x).backward(dy)
    for coded in (False, True):
        model = parallelized(NEAREST, mesh["tp"], kinds, True)
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


def test_tensor_parallelism_and_fsdp2_together(tmp_path):
    run(4, tmp_path, sharded_twice)


# TransformerEngine's arguments.


def layer_of(**settings):
    torch.manual_seed(0)
    return te.TransformerLayer(
        64, 128, 4, hidden_dropout=0, attention_dropout=0, set_parallel_mode=True, layer_number=1,
        device="cpu", activation="swiglu", num_gqa_groups=2, **settings,
    )  # fmt: skip


def part_of(name, parameter, whole, rank, number):
    """A worker's part of a parameter; those of a gate and of what it gates are split apart."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    if name.endswith(("fc1_weight", "fc1_bias")):
        return torch.cat([half.chunk(number)[rank] for half in whole.chunk(2)])
    return whole.chunk(number, parameter.partition_dim)[rank]


def by_arguments(rank, number):
    torch.manual_seed(7)
    x, dy = torch.randn(2, EACH * number, 2, 64)
    for recipe in (NEAREST, "delayed_scaling", None):
        for sequence, fused in ((False, True), (True, False)):
            alone = layer_of(fuse_qkv_params=fused)
            module = layer_of(fuse_qkv_params=fused, tp_size=number, sequence_parallel=sequence)
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
    arguments(rank, number)


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


def test_the_arguments_of_transformer_engine(tmp_path):
    run(2, tmp_path, by_arguments)

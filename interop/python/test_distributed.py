"""Two processes that agree on amaxes, over gloo."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch._formats import Format
from nvfp4.torch._composed import quantized as arrays_of
from workers import NEAREST, run


def worker(rank, number, folder):
    torch.manual_seed(0)
    whole = torch.randn(64, 64) * torch.linspace(0.1, 4, 64)[:, None]
    mine = whole[rank * 32 : rank * 32 + 32]
    module = nvfp4.torch.reduce_amaxes(nvfp4.torch.Linear(64, 48))
    alone = nvfp4.torch.Linear(64, 48)
    alone.load_state_dict(module.state_dict())
    with torch.no_grad():
        together, expected, local = module(mine), alone(whole)[rank * 32 : rank * 32 + 32], alone(mine)
    y = module(mine.requires_grad_())
    y.sum().backward()
    q = nvfp4.te.NVFP4Quantizer(with_amax_reduction=True, with_rht=True, with_post_rht_amax=True)(mine)
    amaxes = torch.cat([q._amax_rowwise, q._amax_columnwise])
    rows = nvfp4.te.NVFP4Quantizer(with_amax_reduction=True, row_scaled_nvfp4=True)(mine)
    assert torch.equal(rows._amax_rowwise, mine.detach().abs().amax(1))
    assert torch.equal(rows._amax_columnwise, whole.abs().amax(0))
    for spec in SPECS:
        assert shares_of_the_whole(spec, whole, rank), spec
    pieces = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(TypeError, match=r"a DTensor lies in pieces.*x\.to_local\(\)"):
        nvfp4.quantize(pieces)
    assert nvfp4.quantize(pieces.to_local()) == nvfp4.quantize(whole[rank * 32 : rank * 32 + 32])
    with pytest.raises(ValueError, match="leave out 'from row'"):
        quantized("mxfp8 / fp8 from row", mine, dist.group.WORLD)
    scales = delayed(whole, rank)
    module.amax_group, alone.amax_group = None, None
    nvfp4.torch.reduce_amaxes(module)
    assert copy.deepcopy(module).amax_group is dist.group.WORLD, "a copy agrees with the same workers"
    again = pickle.loads(pickle.dumps(module))
    assert again.amax_group is None, "a pickle goes where other groups are"
    assert torch.equal(again(mine), alone(mine))
    # The largest value of all is another worker's than the first one's.
    assert torch.equal(again(mine), module(mine)) == (rank == 1)
    if rank == 0:
        # By itself: nobody else takes part, and nobody is waited for.
        assert torch.equal(module.eval()(mine), alone(mine))
        with torch.no_grad():
            assert torch.equal(module(mine), alone(mine))
    nvfp4.torch.stop_reducing_amaxes(module.train())
    if rank == 1:
        assert torch.equal(module(mine), alone(mine))
    nvfp4.torch.reduce_amaxes(module)
    for reentrant in (True, False):
        # Computed again with the amaxes of the first time, also where that is without gradients.
        results = []
        for run in (module, lambda x: checkpoint(module, x, use_reentrant=reentrant)):
            torch.manual_seed(3)
            module.zero_grad()
            run(mine).square().sum().backward()
            results.append(module.weight.grad)
        assert torch.equal(*results)
    losses = [sharded(order, mine.detach()) for order in ("convert, shard", "shard, convert")]
    assert losses[0] == losses[1]
    for recipe in (te.Float8CurrentScaling(fp8_dpa=True), te.DelayedScaling(fp8_dpa=True, fp8_mha=True)):
        attended(recipe, whole, rank)
    torch.save([torch.equal(together, expected), torch.equal(local, expected), amaxes, scales], folder / f"{rank}.pt")


SPECS = ["nvfp4", "nvfp4(hadamard)", "nvfp4(row-scaled)", "fp8", "mxfp8", "fp8 / nvfp4", "mxfp8 / nvfp4(row-scaled)", "nvfp4 / nvfp4 from row",
         "fp8 / nvfp4 from row", "high-precision"]  # fmt: skip


def quantized(spec, x, group):
    format = Format.of(nvfp4.Quantizer(spec=spec, directions="both"))
    parts = arrays_of(x, format, group=group)
    return nvfp4.QuantTensor.from_parts(spec, x.shape, row=parts[: format.row], column=parts[format.row :])


def shares_of_the_whole(spec, whole, rank):
    """Whether a worker's tensor is its part of the one that a single process would make."""
    mine, begin, end = whole[rank * 32 : rank * 32 + 32], rank * 32, rank * 32 + 32
    ours, theirs = quantized(spec, mine, dist.group.WORLD), quantized(spec, whole, None)
    return torch.equal(ours.dequantize(), theirs.dequantize()[begin:end]) and torch.equal(
        ours.dequantize(side="column"), theirs.dequantize(side="column")[:, begin:end]
    )


def delayed(whole, rank):
    """The scales of delayed scaling after a step, each worker on its own tokens; a single process has those of all of them."""
    torch.manual_seed(1)
    module = nvfp4.torch.reduce_amaxes(nvfp4.torch.Linear(64, 48, recipe="delayed_scaling"))
    alone = nvfp4.torch.Linear(64, 48, recipe="delayed_scaling")
    alone.load_state_dict(module.state_dict())
    for layer, x in ((module, whole[rank * 32 : rank * 32 + 32]), (alone, whole)):
        y = layer(x)
        y.backward(x[:, :48])
        nvfp4.torch.update_scales(layer)
    return dict(module.named_buffers()), dict(alone.named_buffers())


def attended(recipe, whole, rank):
    """Each worker has the sequences that a single process would have, of those that it sees."""
    torch.manual_seed(4)
    module = te.MultiheadAttention(64, 4, attention_dropout=0.0, fuse_qkv_params=True, qkv_format="bshd")
    alone, whole, made = copy.deepcopy(module), whole.reshape(4, 16, 64), []
    mine = slice(rank * 2, rank * 2 + 2)
    for layer, x, group in ((module, whole[mine], dist.group.WORLD), (alone, whole, None)):
        for _ in range(2):
            with te.autocast(recipe=recipe, amax_reduction_group=group):
                y = layer(x)
            y.square().sum().backward()
        made.append(y)
    # Products of other sizes are added in another order.
    torch.testing.assert_close(made[0], made[1][mine], rtol=1e-4, atol=1e-4)
    scales = dict(alone.core_attention.named_buffers())
    for name, scale in module.core_attention.named_buffers():
        if name.endswith("scale"):  # the amaxes of the step under way are each worker's own
            torch.testing.assert_close(scale, scales[name])


def sharded(order, x):
    """The losses of a few steps of a model whose parameters lie with all workers."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 48))
    for what in order.split(", "):
        if what == "shard":
            fully_shard(model[2])
            fully_shard(model)
        else:
            assert len(nvfp4.torch.convert_module(model, "mxfp8").converted) == 2
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*returned a view tensor")
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.skipif(not dist.is_available(), reason="torch: this one has no distributed")
def test_workers_quantize_with_the_scale_of_the_whole_batch(tmp_path):
    run(2, tmp_path, worker, tmp_path)
    (first, local, a, scales), (second, _, b, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first and second, "each has the rows that a single process would have"
    assert not local, "which it would not have by itself"
    assert torch.equal(a, b)
    for ours, whole in (scales, others):
        assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)


def compiled(rank, number):
    """A compiler's graph has what workers do together in it."""
    torch.manual_seed(0)
    x, mesh = torch.randn(64, 64), init_device_mesh("cpu", (number,))
    parts = {"0": nvfp4.torch.ColwiseParallel(), "2": nvfp4.torch.RowwiseParallel()}
    for recipe in (NEAREST, "current_scaling", "mxfp8"):
        for split in (False, True):
            model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
            nvfp4.torch.convert_module(model, recipe)
            if split:
                parallelize_module(model, mesh, parts)
            else:
                nvfp4.torch.reduce_amaxes(model, dist.group.WORLD)
            found = []
            for called in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
                model.zero_grad()
                y = called(x if split else x.chunk(number)[rank])
                y.square().sum().backward()
                found.append([y, *(getattr(p.grad, "full_tensor", lambda: p.grad)() for p in model.parameters())])
            assert all(torch.equal(a, b) for a, b in zip(*found)), (recipe, split)


@pytest.mark.skipif(not dist.is_available(), reason="torch: this one has no distributed")
def test_workers_agree_inside_of_a_compilers_graph(tmp_path):
    run(2, tmp_path, compiled)


def test_workers_that_are_not_there_yet():
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        nvfp4.torch.reduce_amaxes(nvfp4.torch.Linear(64, 48))

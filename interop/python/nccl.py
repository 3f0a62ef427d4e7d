"""FSDP2, tensor, sequence and expert parallelism on GPUs, over NCCL: what the gloo tests check on the CPU.

    torchrun --nproc-per-node N interop/python/nccl.py           # N GPUs; one is enough to run it
    torchrun --nproc-per-node 2 interop/python/nccl.py --cpu     # the same over gloo

It prints a line for each check, and exits with 1 if one fails. A layer does not gather within a
group of one worker, so codes are gathered there by themselves.
"""

import pathlib
import shutil
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from workers import NEAREST, gathered_codes, leave

KIND = "cpu" if "--cpu" in sys.argv else "cuda"
WIDE = 256


def model_of(recipe):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDE, 2 * WIDE), torch.nn.GELU(), torch.nn.Linear(2 * WIDE, WIDE)]
    model = torch.nn.Sequential(*layers).to(KIND)
    nvfp4.torch.convert_module(model, recipe)
    return model


def train(model, optimizer=None):
    torch.manual_seed(5)
    optimizer, losses = optimizer or torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(4):
        for x in torch.randn(2, 64, WIDE, device=KIND):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        nvfp4.torch.agree_on_weights(model)
    return losses


def codes():
    """Codes of tokens are gathered, also in a group of one worker."""
    gathered_codes(dist.get_rank(), dist.get_world_size(), KIND)


def replicated(recipe):
    """DDP of workers with their own tokens gives the losses and gradients of one process."""
    number, rank = dist.get_world_size(), dist.get_rank()
    alone, model = model_of(recipe), nvfp4.torch.reduce_amaxes(model_of(recipe))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(9)
    x = torch.randn(64 * number, WIDE, device=KIND)
    mine = slice(rank * 64, rank * 64 + 64)
    expected, y = alone(x), wrapped(x[mine])
    torch.testing.assert_close(y, expected[mine], rtol=1e-3, atol=1e-3)
    expected.square().mean().backward()
    y.square().mean().backward()
    for found, of in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(found.grad, of.grad, rtol=1e-2, atol=1e-4)


def saved(recipe):
    """A checkpoint has the weights and the state of the optimizer, and training goes on from it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device(KIND))
    found = []
    for kind in ("on", "from a checkpoint"):
        model = model_of(recipe)
        nvfp4.torch.gather_codes(model)
        for layer in (model[0], model[2], model):
            fully_shard(layer, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if kind == "on":
            train(model, optimizer)
        weights, states = get_state_dict(model, optimizer)
        state, files = {"model": weights, "optimizer": states}, pathlib.Path(folder[0]) / "files"
        if kind == "on":
            dcp.save(state, checkpoint_id=files)
        else:
            dcp.load(state, checkpoint_id=files)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append(train(model, optimizer))
    assert found[0] == found[1], found
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def sharded(recipe, policy):
    """Losses are the same whether weights travel as codes or as values."""
    found = []
    for coded in (False, True):
        model = model_of(recipe)
        if coded:
            nvfp4.torch.gather_codes(model)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=policy), reshard_after_forward=True)
        found.append(train(model))
    assert found[0] == found[1], found


def split(recipe):
    """Tokens that travel as codes give the results of one process, but for the order of sums."""
    number, rank = dist.get_world_size(), dist.get_rank()
    mesh, alone, model = init_device_mesh(KIND, (number,)), model_of(recipe), model_of(recipe)
    plan = {"0": nvfp4.torch.ColwiseParallel(input_layouts=Shard(1)),
            "2": nvfp4.torch.RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
    parallelize_module(model, mesh, plan)
    torch.manual_seed(7)
    x, mine = torch.randn(2, 64 * number, WIDE, device=KIND), slice(rank * 64, rank * 64 + 64)
    expected, y = alone(x), model(x[:, mine])
    torch.testing.assert_close(y, expected[:, mine], rtol=1e-3, atol=1e-3)
    expected.backward(x)
    y.backward(x[:, mine])
    for found, of in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(found.grad.full_tensor(), of.grad, rtol=1e-2, atol=1e-2)


def by_arguments(recipe):
    """A layer of TransformerEngine's names over all workers runs both passes."""
    layer = te.TransformerLayer(
        WIDE, 2 * WIDE, 8, hidden_dropout=0, attention_dropout=0, set_parallel_mode=True,
        sequence_parallel=True, tp_group=dist.group.WORLD, device=KIND, layer_number=1,
    )  # fmt: skip
    x = torch.randn(64, 2, WIDE, device=KIND, requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = layer(x)
        y.sum().backward()
    assert torch.isfinite(x.grad).all()


def routed(recipe):
    """Experts of all workers give tokens what experts of one process give them."""
    number, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    alone = nvfp4.torch.GroupedLinear(2 * number, WIDE, WIDE, recipe=recipe, device=KIND)
    mine = nvfp4.torch.GroupedLinear(2, WIDE, WIDE, recipe=recipe, device=KIND)
    named = dict(alone.named_parameters())
    with torch.no_grad():
        for at in range(2):
            for name in ("weight", "bias"):
                getattr(mine, f"{name}{at}").copy_(named[f"{name}{2 * rank + at}"])
    x = torch.randn(2 * number, number, 32, WIDE, device=KIND)  # by expert, then by worker
    splits, of_all = [32] * 2 * number, [32 * number] * 2 * number
    expected = alone(x.flatten(0, 2), of_all).view(x.shape)[:, rank].flatten(0, 1)
    routes = nvfp4.torch.Routes(splits)
    for layer in (lambda x: routes.combine(mine(x, routes.dispatch)), lambda x: mine(routes.dispatch(x), routes.combine)):
        tokens = x[:, rank].flatten(0, 1).requires_grad_()
        y = layer(tokens)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
        y.sum().backward()
        assert torch.isfinite(tokens.grad).all()


CHECKS = [(codes,), (replicated, NEAREST), (replicated, "current_scaling"), (saved, "nvfp4"), (saved, "current_scaling")]
CHECKS += [(sharded, recipe, policy) for recipe in ("nvfp4", "nvfp4_1d_weight", "current_scaling", "mxfp8")
          for policy in (None, torch.bfloat16)]  # fmt: skip
CHECKS += [(split, recipe) for recipe in (NEAREST, "current_scaling", "mxfp8")]
CHECKS += [(routed, recipe) for recipe in (NEAREST, "nvfp4_row_scaled", "current_scaling", "mxfp8")]
CHECKS += [(by_arguments, recipe) for recipe in (NEAREST, "nvfp4", "delayed_scaling")]


def main():
    dist.init_process_group("gloo" if KIND == "cpu" else "nccl")
    if KIND == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    failed = 0
    for check, *given in CHECKS:
        name = f"{check.__name__}({', '.join('NEAREST' if of is NEAREST else str(of) for of in given)})"
        try:
            check(*given)
            said = "ok"
        except Exception:
            failed, said = failed + 1, traceback.format_exc()
        if dist.get_rank() == 0:
            print(f"{name}: {said}", flush=True)
    dist.barrier()
    leave(bool(failed))


if __name__ == "__main__":
    main()

"""Two processes that agree on amaxes, over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nvfp4.te
import nvfp4.torch


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
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
    torch.save([torch.equal(together, expected), torch.equal(local, expected), amaxes], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_workers_quantize_with_the_scale_of_the_whole_batch(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    (first, local, a), (second, _, b) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first and second, "each has the rows that a single process would have"
    assert not local, "which it would not have by itself"
    assert torch.equal(a, b)


def test_formats_without_one_amax_are_refused():
    module = nvfp4.torch.Linear(64, 48, recipe="mxfp8")
    module.amax_group = object()
    with pytest.raises(ValueError, match="no single amax"):
        module(torch.randn(32, 64))

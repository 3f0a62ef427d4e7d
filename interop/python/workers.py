"""What tests with several gloo processes share."""

import contextlib

import torch
import torch.distributed as dist

import nvfp4

# Random numbers are drawn by position, and parts have positions of their own.
NEAREST = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')


def begin(rank, number, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)


def end():
    """No worker leaves while another still waits for what it sends."""
    dist.barrier()
    dist.destroy_process_group()


def close(a, b):
    """Equal but for the order in which sums are added."""
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@contextlib.contextmanager
def case(*words):
    """Names the case in which something is not as it should be."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from error

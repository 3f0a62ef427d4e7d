"""What tests with several gloo processes share."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist

import nvfp4

# Random numbers are drawn by position, and parts have positions of their own.
NEAREST = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')


def begin(rank, number, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)


def end():
    """Ends a worker that has found nothing wrong.

    No worker leaves while another still waits for what it sends. And none leaves as Python does: a
    thread of gloo frees the tensors of its last sum when it gets to it, needs the interpreter for
    that, and aborts the process if the interpreter is ending.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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

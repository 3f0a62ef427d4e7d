"""What tests with several gloo processes share."""

import contextlib
import faulthandler
import os
import pathlib
import sys
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nvfp4

# Random numbers are drawn by position, and parts have positions of their own.
NEAREST = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')


def run(number, folder, function, *given):
    """Runs ``function(rank, number, *given)`` in so many workers. Raises what all of them say that
    fail: the one that is seen first may have failed because another had left.
    """
    folder.mkdir(exist_ok=True)
    try:
        mp.spawn(_worker, (number, str(folder), function, given), nprocs=number)
    except mp.ProcessExitedException as error:
        said = [path.read_text() for path in sorted(folder.glob("failed-*"))]
        raise RuntimeError("\n".join([str(error), *said])) from None
    # A worker says that it came to its end: the exit status alone would not tell.
    missing = [rank for rank in range(number) if not (folder / f"done-{rank}").exists()]
    assert not missing, f"workers {missing} left before their end"
    for file in [folder / "store", *folder.glob("done-*")]:
        file.unlink(missing_ok=True)


def _worker(rank, number, folder, function, given):
    """No worker leaves while another still waits for what it sends. And none leaves as Python does,
    not even one that fails: a thread of gloo frees the tensors of its last sum when it gets to it,
    needs the interpreter for that, and aborts the process if the interpreter is ending.
    """
    faulthandler.enable()
    folder, status = pathlib.Path(folder), 1
    try:
        torch.set_num_threads(1)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
        function(rank, number, *given)
        dist.barrier()
        (folder / f"done-{rank}").touch()
        status = 0
    except BaseException:
        text = f"Worker {rank} of {number}:\n{traceback.format_exc()}"
        (folder / f"failed-{rank}").write_text(text)
    finally:
        leave(status)


def leave(status):
    """Ends a process without the end of the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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

"""What tests with several gloo processes share.

``workers.py PROGRAM …`` runs a program, as one of torchrun's workers, that ends as these do.
"""

import contextlib
import faulthandler
import os
import pathlib
import runpy
import sys
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nvfp4
from nvfp4.torch._agree import Split
from nvfp4.torch._composed import quantized
from nvfp4.torch._formats import Format
from nvfp4.torch._parallel import gathering_arrays

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


class Counted:
    """Counts what a worker gives to collectives of torch.distributed, from now on: the ``bytes`` of
    gathers and exchanges by their type, and the amaxes of each reduction.
    """

    def __init__(self, patch):
        self.bytes, self.reductions = {}, []
        for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single"):
            if hasattr(dist, name):  # the first one is of newer torch
                patch.setattr(dist, name, self._given_to(getattr(dist, name)))
        reduce = dist.all_reduce

        def reduces(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
            if op == dist.ReduceOp.MAX:
                self.reductions.append(tensor.numel())
            return reduce(tensor, op, *args, **kwargs)

        patch.setattr(dist, "all_reduce", reduces)

    def _given_to(self, collective):
        def counted(output, input, *args, **kwargs):
            self.bytes[input.dtype] = self.bytes.get(input.dtype, 0) + input.nbytes
            return collective(output, input, *args, **kwargs)

        return counted

    def taken(self):
        """The bytes of all types, and begins again."""
        total = sum(self.bytes.values())
        self.bytes.clear()
        return total


def documented(section):
    """The table of bytes in a section of docs/scale.md: for each row's name, its formulas."""
    page = pathlib.Path(__file__).parents[2] / "docs/scale.md"
    text = page.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = text.split("| travels as |")[1].split("\n\n")[0].splitlines()[2:]
    return {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in (row.split("|") for row in rows)}


def evaluated(formula, **sizes):
    """The number that a formula of that page gives."""
    return eval(formula.replace("·", "*"), {"__builtins__": {}}, sizes)


def gathered_codes(rank, number, device="cpu", each=32):
    """Codes that are gathered are those of all tokens, code for code. A group of one worker, as one
    GPU has it, sends and receives them too.
    """
    torch.manual_seed(1)
    whole = (torch.randn(each * number, 64) * torch.linspace(0.1, 4, each * number)[:, None]).to(device)
    mine = whole[rank * each : rank * each + each]
    for spec in ("nvfp4", "nvfp4(hadamard)", "nvfp4(row-scaled)", "fp8(e4m3)", "mxfp8(e4m3)"):
        format = Format.of(nvfp4.Quantizer(spec=spec, directions="both"))
        expected = quantized(whole, format)
        arrays = quantized(mine, format, group=Split((dist.group.WORLD,)))
        sides = {"row": slice(0, format.row), "column": slice(format.row, None)}
        for side, at in sides.items():
            found = gathering_arrays(arrays[at], spec, side, tuple(mine.shape), dist.group.WORLD)()
            assert all(torch.equal(a, b) for a, b in zip(found, expected[at], strict=True)), (spec, side)
        # Features that are split: a token's own scale is agreed on, too.
        part = quantized(whole.chunk(number, 1)[rank].contiguous(), format, group=Split((), (dist.group.WORLD,)))
        rows = [[array.cpu() for array in arrays[: format.row]] for arrays in (part, expected)]
        tensor = nvfp4.QuantTensor.from_parts(spec, (len(whole), 64 // number), row=rows[0])
        of_all = nvfp4.QuantTensor.from_parts(spec, whole.shape, row=rows[1])
        assert torch.equal(tensor.dequantize(), of_all.dequantize().chunk(number, 1)[rank]), spec


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


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave(0)

"""Puts on the CPU what TransformerEngine's tests put on a GPU, for machines that have none."""

from __future__ import annotations

import contextlib
import pathlib
import sys

import torch
from torch.overrides import TorchFunctionMode

import cpu_graphs
import nvfp4.te


def _there(value):
    """The same place on the CPU, if this is one on a GPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


class _OnCpu(TorchFunctionMode):
    """Torch's functions, with the CPU for every GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: _there(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*(_there(value) for value in args), **kwargs)


def _only_there():
    raise NotImplementedError("this is not supported here: it needs a GPU")


def install(checkout: pathlib.Path) -> None:
    """From now on. Tests and what captures graphs are told that there is a GPU, nobody else is."""
    told = str(checkout.resolve() / "tests"), nvfp4.te._graph.__file__
    real = torch.cuda.is_available

    def is_available():
        return sys._getframe(1).f_code.co_filename.startswith(told) or real()

    torch.cuda.is_available = is_available
    # A function each: compilers know torch's by their objects.
    silent = "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"
    for name in (*silent, "set_device"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: 0
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *args, **given: begin(
        *args, **{**given, "backend": "gloo"}
    )
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    nvfp4.te.get_device_compute_capability = torch.cuda.get_device_capability
    torch.cuda.memory_allocated = lambda device=None: _only_there()
    torch.cuda.max_memory_allocated = lambda device=None: _only_there()
    cpu_graphs.install()
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.nn.Module.cuda = lambda self, device=None: self
    _OnCpu().__enter__()

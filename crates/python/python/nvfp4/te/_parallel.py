"""TransformerEngine's tensor and sequence parallelism: workers of a process group have parts of the
weights.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4.torch._parallel import Parallel, Workers, gathered

from ._settable import Settable

_INSTEAD = "use torch's own (torch.distributed.tensor.parallel), FSDP or DDP"


def one_worker(where: str, tp_size: int, tp_group: Any) -> None:
    """Refuses parallelism over more than one worker. With one, ``sequence_parallel``,
    ``parallel_mode`` and the like say nothing, as in TransformerEngine.
    """
    tp_size = size_of(tp_size, tp_group)
    if tp_size != 1:
        name = "tp_size" if tp_group is None else "tp_group"
        raise NotImplementedError(
            f"te.{where}: the argument {name} is not supported here for {tp_size} workers: "
            f"there is no tensor parallelism; {_INSTEAD}"
        )


def size_of(tp_size: int, tp_group: Any) -> int:
    """How many workers there are: those of the group, if it is given."""
    return tp_size if tp_group is None else dist.get_world_size(tp_group)


def divided(where: str, name: str, number: int, tp_size: int) -> int:
    """A worker's part of a number."""
    if number % tp_size:
        raise ValueError(f"te.{where}: {name}={number} does not divide among {tp_size} workers")
    return number // tp_size


def part(where: str, mode: Optional[str], sizes: Dict[str, int], tp_size: int) -> Dict[str, int]:
    """The sizes of a worker's part of a linear layer: some outputs ("column") or some inputs
    ("row").
    """
    if mode not in (None, "column", "row"):
        raise ValueError(f"te.{where}: unknown parallel_mode '{mode}'; there are 'column', 'row'")
    name = {"column": "out_features", "row": "in_features"}.get(mode or "")
    return {
        key: divided(where, key, size, tp_size) if key == name else size
        for key, size in sizes.items()
    }


def marked(parameter: Any, mode: Optional[str]) -> None:
    """Notes on a parameter how it is split, which Megatron reads."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = 1 if mode == "row" else 0
    parameter.partition_stride = 1


class Shards(torch.nn.Module):
    """A module whose workers have parts of its weights."""

    tp_size: int = 1
    sequence_parallel: bool = False
    # The mode of each product.
    _modes: Dict[int, str] = {}
    _parallel: Dict[int, Parallel]

    @property
    def tp_group(self) -> Any:
        there = next(iter(self._parallel.values()), None)
        return None if there is None or there.workers is None else there.workers.group

    def splits(
        self, modes: Dict[int, Optional[str]], tp_size: int, tp_group: Any, sequence: bool
    ) -> None:
        """Says how its products are split, once it has its parameters."""
        self.tp_size = size_of(tp_size, tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence
        self._modes = {number: mode for number, mode in modes.items() if mode is not None}
        self._set(tp_group)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._mark(name, parameter)

    def _set(self, group: Any) -> None:
        workers = None if group is None else Workers(group)
        self._parallel = {
            number: Parallel(mode, workers, self.sequence_parallel)
            for number, mode in self._modes.items()
            if self.tp_size > 1
        }

    def _mark(self, name: str, parameter: Any) -> None:
        """Notes what Megatron reads: how a parameter is split, or that its gradient is that of this
        worker's tokens alone.
        """
        mode = self._modes.get(1 if name.startswith("fc2_") else 0)
        norm, bias = name.startswith("layer_norm_"), "bias" in name
        if norm or (bias and mode == "row"):
            parameter.sequence_parallel = self.sequence_parallel
        elif mode is not None:
            marked(parameter, mode)

    def set_tensor_parallel_group(self, tp_group) -> None:
        """Gives the process group to a module that was made with ``tp_size`` alone."""
        if tp_group is not None and dist.get_world_size(tp_group) != self.tp_size:
            raise ValueError(
                f"te.{type(self).__name__}.set_tensor_parallel_group: expected a group of "
                f"tp_size={self.tp_size} workers, got {dist.get_world_size(tp_group)}"
            )
        self._set(tp_group)


class ShardsOfParts(Settable):
    """A module whose parts may have parts of weights."""

    def set_tensor_parallel_group(self, tp_group) -> None:
        """Gives the process group to all parts."""
        for child in self.children():
            if isinstance(child, (Shards, ShardsOfParts)):
                child.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group, cp_global_ranks, cp_stream, cp_comm_type: str = "p2p"
    ) -> None:
        no_context_parallelism(f"{type(self).__name__}.set_context_parallel_group", cp_group)


def no_context_parallelism(where: str, cp_group: Any) -> None:
    """Refuses sequences that are split over workers."""
    if cp_group is not None:
        raise NotImplementedError(
            f"te.{where}: the argument cp_group is not supported here: "
            f"there is no context parallelism; {_INSTEAD}"
        )


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, dy):
        count = dist.get_world_size(ctx.group)
        dx = dy.new_empty((dy.shape[0] // count, *dy.shape[1:]))
        dist.reduce_scatter_tensor(dx, dy.contiguous(), group=ctx.group)
        return dx, None


def all_tokens(module: Shards, x: Tensor, asked: bool) -> Tensor:
    """The tokens of all workers, where they are asked for and split."""
    if not (asked and module.sequence_parallel):
        return x
    return _Tokens.apply(x, module.tp_group)

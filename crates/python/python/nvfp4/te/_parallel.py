"""Arguments of TransformerEngine's tensor parallelism, which this package does not have."""

from __future__ import annotations

from typing import Any

import torch

_INSTEAD = "use torch's own (torch.distributed.tensor.parallel), FSDP or DDP"


def one_worker(where: str, tp_size: int, tp_group: Any) -> None:
    """Refuses parallelism over more than one worker. With one, ``sequence_parallel``,
    ``parallel_mode`` and the like say nothing, as in TransformerEngine.
    """
    if tp_group is not None:
        tp_size = torch.distributed.get_world_size(tp_group)
    if tp_size != 1:
        name = "tp_size" if tp_group is None else "tp_group"
        raise NotImplementedError(
            f"te.{where}: the argument {name} is not supported here for {tp_size} workers: "
            f"there is no tensor parallelism; {_INSTEAD}"
        )


class OneWorker:
    """A module that takes the process groups of one worker."""

    def set_tensor_parallel_group(self, tp_group) -> None:
        one_worker(f"{type(self).__name__}.set_tensor_parallel_group", 1, tp_group)

    def set_context_parallel_group(
        self, cp_group, cp_global_ranks, cp_stream, cp_comm_type: str = "p2p"
    ) -> None:
        no_context_parallelism(f"{type(self).__name__}.set_context_parallel_group", cp_group)


def no_context_parallelism(where: str, cp_group: Any) -> None:
    """Refuses sequences that are split over workers."""
    if cp_group is not None:
        raise NotImplementedError(
            f"te.{where}: the argument cp_group is not supported here: there is no context parallelism; {_INSTEAD}"
        )

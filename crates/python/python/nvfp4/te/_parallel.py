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


def no_context_parallelism(where: str, cp_group: Any) -> None:
    """Refuses sequences that are split over workers."""
    if cp_group is not None:
        raise NotImplementedError(
            f"te.{where}: the argument cp_group is not supported here: there is no context parallelism; {_INSTEAD}"
        )

"""Quantized weights from masters of an optimizer whose workers hold parts of them."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from ._float8 import Float8Tensor
from ._hybrid import HybridQuantizedTensor
from ._identity import IdentityTensor


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Optional[Tensor]],
    start_offsets: Sequence[Optional[int]],
    group: Any,
    fsdp_shard_model_weights: Optional[Sequence[Any]] = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantizes weights from their masters, which are rounded to the type of the weight before.

    A master is the flat part of a weight that this worker of ``group`` holds, from its offset on,
    or None. Parts of all workers are brought together here, so that every format is quantized as
    one tensor, in both directions, and every worker has all codes. Where the workers hold some
    values alone, the others keep their codes, in formats without a scale or with one for all.
    """
    if fsdp_shard_model_weights is not None:
        raise NotImplementedError(
            "quantize_master_weights: fsdp_shard_model_weights is not supported here; give whole "
            "weights"
        )
    workers = 1 if group is None else torch.distributed.get_world_size(group)
    parts = list(zip(model_weights, master_weights, start_offsets))
    for number, part in enumerate(parts):
        _check_part(number, *part)
    counts = torch.tensor([0 if master is None else master.numel() for _, master, _ in parts])
    if workers > 1:
        counts = counts.to(model_weights[0].device)
        torch.distributed.all_reduce(counts, group=group)
    held = counts.tolist()
    for number, (count, weight) in enumerate(zip(held, model_weights)):
        if count not in (0, weight.numel()) and not isinstance(weight, _IN_PARTS):
            source = getattr(weight._quantizer, "columnwise_source", None)
            how = "" if source is None else f" with columnwise_source={source!r}"
            raise ValueError(
                f"master_weights[{number}]: a partial master shard, {count} of {weight.numel()} "
                f"values, for a {type(weight).__name__}{how}, whose parts are quantized together: "
                "give full-master data"
            )
    for count, (weight, master, start) in zip(held, parts):
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        if count == 0:
            continue
        values = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
        there = torch.zeros(weight.numel(), dtype=torch.uint8, device=weight.device)
        if master is not None and start is not None:
            values[start : start + master.numel()] = master.flatten().to(weight.dtype)
            there[start : start + master.numel()] = 1
        whole = count == weight.numel()
        if workers > 1:
            torch.distributed.all_reduce(values, group=group)  # a number and zeros
            if not whole:
                torch.distributed.all_reduce(there, group=group)
        if whole:
            weight.quantize_(values.reshape(weight.shape))
        else:
            _put(weight, values.reshape(weight.shape), there.bool().reshape(weight.shape))


# Tensors whose codes do not depend on their neighbours' but for one scale.
_IN_PARTS = (IdentityTensor, Float8Tensor)


def _put(weight: Any, values: Tensor, there: Tensor) -> None:
    """Quantizes the values that are there. The codes of the others stay, under a scale that may be
    another: whoever holds their masters sends them.
    """
    if isinstance(weight, IdentityTensor):
        weight._hp_data[there] = values[there]
        return
    made = weight._get_quantizer().copy()
    made.set_usage(rowwise=True, columnwise=False)
    quantized = made(values)
    if weight._data is not None:
        weight._data[there] = quantized._data[there]
    if weight._transpose is not None:
        weight._transpose.movedim(0, -1)[there] = quantized._data[there]
    weight._scale_inv.copy_(quantized._scale_inv)


def _check_part(number: int, weight: Any, master: Optional[Tensor], start: Optional[int]) -> None:
    if master is None:
        return
    if isinstance(weight, HybridQuantizedTensor) and not weight._sides():
        raise ValueError(
            f"model_weights[{number}]: it has dropped both rowwise and columnwise codes, so that "
            "there is nothing to update; keep one with update_usage"
        )
    if start is None or start < 0 or start + master.numel() > weight.numel():
        raise ValueError(
            f"start_offsets[{number}]: {master.numel()} values from {start} on are not in a weight "
            f"of {weight.numel()}"
        )


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[Optional[Tensor]],
    start_offsets: Sequence[Optional[int]],
    group: Any,
    fsdp_shard_model_weights: Optional[Sequence[Any]] = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """The old name of :func:`quantize_master_weights`."""
    quantize_master_weights(
        model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    )  # fmt: skip


def post_all_gather_processing(model_weights: Any) -> None:
    """Does nothing: :func:`quantize_master_weights` makes both directions."""


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Moves the codes of a tensor to other memory of the same type, such as a part of a buffer that
    an optimizer keeps. Of a tensor in two formats it is the row direction.
    """
    row = getattr(tensor, "_rowwise_storage", None)
    if row is not None:
        return replace_raw_data(row, new_raw_data)
    known = ("_data", "_rowwise_data", "_hp_data")
    names = [name for name in known if getattr(tensor, name, None) is not None]
    if not names:
        raise ValueError(f"replace_raw_data: {type(tensor).__name__} has no codes of its rows")
    old = getattr(tensor, names[0])
    if old.dtype != new_raw_data.dtype:
        raise ValueError(
            "replace_raw_data: the data types of raw data don't match: "
            f"{old.dtype} and {new_raw_data.dtype}"
        )
    new_raw_data.detach().copy_(old)
    setattr(tensor, names[0], new_raw_data)

"""Models whose weights travel as codes."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import torch

from ._agree import Split
from ._gather import GathersCodes, agree, hindrance_of
from ._layer import Layer
from ._parameters import put
from ._quantized import CodedWeight
from ._travel import hindrance, sent_bytes


class Travels(NamedTuple):
    """How a weight travels: as codes, or in high precision for a ``reason``. ``bytes`` are those of
    all shards in one gather, ``high_precision`` those that they would be in high precision.
    """

    name: str
    reason: Optional[str]
    bytes: int
    high_precision: int


class Gathering(List[Travels]):
    """How the weights of a model travel. ``str`` is a table."""

    def __str__(self) -> str:
        how = ["codes" if t.reason is None else f"high precision: {t.reason}" for t in self]
        total, plain = sum(t.bytes for t in self), sum(t.high_precision for t in self)
        line = f"a gather: {total:,} bytes, {plain:,} in high precision"
        width = max((len(t.name) for t in self), default=0)
        rows = [f"{t.name:<{width}}  {t.bytes:>11,}  {text}" for t, text in zip(self, how)]
        return "\n".join([*rows, line])


def gather_codes(
    model: torch.nn.Module,
    workers: Optional[int] = None,
    dtype: Optional[torch.dtype] = None,
) -> Gathering:
    """Makes FSDP2 gather the weights of a model's quantized layers as codes, not as values. Gives
    how each weight travels among so many ``workers`` (all processes, if no number is given) when
    they are gathered in this type (their own, if none is given).

    Call it after :func:`convert_module` and before ``fully_shard``; with tensor parallelism also
    after ``parallelize_module``. Weights stay parameters in high precision, for optimizers and
    checkpoints. A shard is cast to the ``param_dtype`` of the mixed precision policy and quantized
    with the amax of the whole weight, so the codes are those that one process makes. They are freed
    with the gathered weight (``reshard_after_forward``). Shards that are no whole blocks travel in
    high precision; this is only said here.

    >>> import torch, nvfp4.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 40))
    >>> report = nvfp4.torch.convert_module(model, "nvfp4")
    >>> print(nvfp4.torch.gather_codes(model, workers=2, dtype=torch.bfloat16))
    0.weight        2,064  codes
    1.weight        5,120  high precision: 40 rows on 2 workers are no whole blocks of 16 rows
    a gather: 7,184 bytes, 13,312 in high precision
    """
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("gather_codes: the model is sharded already; call it before fully_shard")
    if workers is None:
        there = torch.distributed.is_initialized()
        workers = torch.distributed.get_world_size() if there else 1
    made: Dict[int, torch.nn.Parameter] = {}
    travels = Gathering()
    for path, module in model.named_modules():
        if not isinstance(module, Layer):
            continue
        for name, (_, _, formats) in zip(module.weights(), module.products()):
            weight = module._parameters.get(name)
            if weight is None:
                continue
            full = f"{path}.{name}" if path else name
            local = getattr(weight, "_local_tensor", weight)
            rows, cols = local.shape
            asked = weight.dtype if dtype is None else dtype
            never = _never(module, weight, formats)
            spec = formats.weight.spec
            why = never or hindrance(spec, (rows, cols), workers, asked)
            plain = rows * cols * asked.itemsize
            codes = plain if why else sent_bytes(spec, "both", (rows, cols))
            travels.append(Travels(full, why, codes, plain))
            if never:
                continue
            if id(weight) not in made:
                put(module, name, _wrapped(weight, formats.weight.spec))
                parameter = module._parameters[name]
                assert parameter is not None
                made[id(weight)] = parameter
            module._parameters[name] = made[id(weight)]
    return travels


def _never(module: Layer, weight: torch.Tensor, formats) -> Optional[str]:
    """Why a weight never travels as the codes of its layer."""
    if hasattr(module, "following"):
        return "its format is that of nvfp4.te.autocast, which a gather does not see"
    if isinstance(weight, CodedWeight):
        return "it exists as codes, which travel as they are"
    return hindrance_of(formats)


def _wrapped(weight: torch.Tensor, spec: str) -> torch.Tensor:
    if not hasattr(weight, "device_mesh"):
        return GathersCodes(weight.detach(), spec)
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    rows: List[Any] = []
    cols: List[Any] = []
    for at, placement in enumerate(weight.placements):
        if placement.is_shard():
            parts = rows if placement.dim == 0 else cols  # type: ignore[attr-defined]
            parts.append(weight.device_mesh.get_group(at))
    local = GathersCodes(weight._local_tensor.detach(), spec, Split(tuple(rows), tuple(cols)))
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements,
        run_check=False, shape=weight.shape, stride=weight.stride(),
    )  # fmt: skip


def agree_on_weights(model: torch.nn.Module) -> None:
    """Makes all workers agree on the amaxes of all weights that travel as codes, in one reduction.

    Call it after each step of the optimizer, on all workers. Without it each weight's workers agree
    when it is first gathered after the step, in a reduction of its own. A weight that was not
    gathered yet is left out.

    >>> import torch, nvfp4.torch
    >>> nvfp4.torch.agree_on_weights(torch.nn.Linear(64, 64))
    """
    found: Dict[int, GathersCodes] = {}
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        if isinstance(local, GathersCodes) and local._agreed.dtype is not None:
            found.setdefault(id(local._agreed), local)
    with torch.no_grad():
        agree(list(found.values()))

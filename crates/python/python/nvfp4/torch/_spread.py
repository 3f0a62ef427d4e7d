"""Products of DTensors, and the styles of ``parallelize_module`` whose tokens travel as codes."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as styles

from ._function import linear
from ._main_grad import Later
from ._parallel import Parallel, Workers


def spread_linear(
    x: Any,
    weight: Any,
    bias: Any,
    given: Tuple[Any, ...],
    later: Optional[Later],
    output: Any = None,
) -> Tensor:
    """``x·wᵀ + bias`` where the weight is a DTensor: the parts that this worker has are multiplied
    as ``parallel`` says. ``given`` is everything else that a layer gives to its product. A sum over
    workers is spread as ``output`` says, or left to be added.
    """
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"a weight on a mesh of {mesh.ndim} dimensions; shard it over one, as with mesh['tp']"
        )
    if not isinstance(x, DTensor):
        raise TypeError(
            "the weight is a DTensor and the input is not: parallelize the layer with "
            "parallelize_module, or make the input one with DTensor.from_local"
        )
    (part,), (tokens,), workers = weight.placements, x.placements, Workers(mesh.get_group())
    last, kept = x.ndim - 1, later if later is None else later._replace(weight=weight.to_local())
    # The codes of a weight are kept beside an object that lives; its part is made anew.
    given = (*given[:5], None, *given[6:])
    seq = _tokens_split(tokens, last)

    def product(x: Tensor, w: Tensor, b: Optional[Tensor], parallel: Optional[Parallel]) -> Tensor:
        return linear(x, w, b, *given, later=kept, parallel=parallel)  # type: ignore[misc]

    if part.is_replicate():
        sums = [Replicate()] if tokens.is_replicate() else [Partial()]
        b = None if bias is None else bias.to_local(grad_placements=sums)
        y = product(x.to_local(), weight.to_local(grad_placements=sums), b, None)
        return DTensor.from_local(y, mesh, [tokens], run_check=False)
    if part.is_shard(0):
        b = None if bias is None else bias.to_local()
        if seq is None:
            x = x if tokens.is_replicate() else x.redistribute(placements=[Replicate()])
            local = x.to_local(grad_placements=[Partial()])
            y = product(local, weight.to_local(), b, Parallel("column", workers, sums="leave"))
        else:
            local = x.to_local().flatten(0, -2)
            y = product(local, weight.to_local(), b, Parallel("column", workers, sequence=True))
            y = _in_order(y, x.shape, seq, mesh.size())
        return DTensor.from_local(y, mesh, [Shard(last)], run_check=False)
    if not part.is_shard(1):
        raise ValueError(
            f"a weight with the placement {part}; there are Shard(0), Shard(1), Replicate()"
        )
    if not tokens.is_shard(last):
        x = x.redistribute(placements=[Shard(last)])
    seq = None if output is None else _tokens_split(output, last)
    if seq is None:
        b = None if bias is None else bias.to_local()
        y = product(x.to_local(), weight.to_local(), b, Parallel("row", workers, sums="leave"))
        return DTensor.from_local(y, mesh, [Partial()], run_check=False)
    b = None if bias is None else bias.to_local(grad_placements=[Partial()])
    local = _by_worker(x.to_local(), seq, mesh.size())
    y = product(local, weight.to_local(), b, Parallel("row", workers, sequence=True))
    shape = list(x.shape[:-1])
    shape[seq] //= mesh.size()
    return DTensor.from_local(y.view(*shape, -1), mesh, [Shard(seq)], run_check=False)


def _tokens_split(placement: Any, last: int) -> Optional[int]:
    """The dimension that tokens are split along, if they are."""
    if not placement.is_shard():
        return None
    dim = placement.dim % (last + 1)
    return None if dim == last else dim


def _by_worker(x: Tensor, dim: int, size: int) -> Tensor:
    """All tokens as a matrix: those of the first worker, then those of the next."""
    if x.shape[dim] % size:
        raise ValueError(f"{x.shape[dim]} tokens do not divide among {size} workers")
    return torch.stack(x.chunk(size, dim)).flatten(0, -2)


def _in_order(y: Tensor, shape: torch.Size, dim: int, size: int) -> Tensor:
    """The inverse: tokens in the order of a tensor of this shape."""
    if shape[dim] % size:
        raise ValueError(f"{shape[dim]} tokens do not divide among {size} workers")
    each = list(shape[:-1])
    each[dim] //= size
    return torch.cat(list(y.view(size, *each, -1)), dim)


class ColwiseParallel(styles.ColwiseParallel):
    """torch's ``ColwiseParallel`` for quantized layers: tokens that are split among workers
    (``input_layouts=Shard(1)``) travel as codes.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        given: Any = self.input_layouts[0]
        if _is_layer(module) and given.is_shard() and given.dim >= 0:
            self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]
        return super()._apply(module, device_mesh)


class RowwiseParallel(styles.RowwiseParallel):
    """torch's ``RowwiseParallel`` for quantized layers: where tokens of the output are split among
    workers (``output_layouts=Shard(1)``), their gradients travel as codes.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        given: Any = self.output_layouts[0]
        if _is_layer(module) and given.is_shard() and given.dim >= 0:
            module.output_layout = given  # type: ignore[assignment]
        return super()._apply(module, device_mesh)


def _is_layer(module: torch.nn.Module) -> bool:
    from ._layer import Layer

    return isinstance(module, Layer)

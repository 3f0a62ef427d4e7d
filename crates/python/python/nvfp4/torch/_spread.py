"""Products and norms of DTensors; the styles that make them are in ``_styles.py``."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
    mesh = _checked_mesh(x, weight)
    (part,), (tokens,), workers = weight.placements, x.placements, Workers(mesh.get_group())
    last, kept = x.ndim - 1, later if later is None else later._replace(weight=weight.to_local())
    # Codes are kept beside the DTensor: its part is made anew for every pass.
    whole = (*given[:5], None, *given[6:])
    seq = _tokens_split(tokens, last)

    def product(x: Tensor, w: Tensor, b: Optional[Tensor], parallel: Optional[Parallel]) -> Tensor:
        if parallel is None:
            return linear(x, w, b, *whole, later=kept)  # type: ignore[misc]
        parallel = parallel._replace(lives=weight)
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


def spread_norm(x: Any, weight: Any, bias: Any, norm: Callable[..., Tensor]) -> Tensor:
    """A norm whose parameters are DTensors that every worker has: of the tokens that this one has.
    ``norm`` computes it from tensors.
    """
    mesh, last = _checked_mesh(x, weight), x.ndim - 1
    if not x.placements[0].is_replicate() and _tokens_split(x.placements[0], last) is None:
        x = x.redistribute(placements=[Replicate()])  # a norm reads all features of a token
    sums = [Replicate()] if x.placements[0].is_replicate() else [Partial()]
    of = [None if p is None else p.to_local(grad_placements=sums) for p in (weight, bias)]
    y = norm(x.to_local(), *of)
    return DTensor.from_local(y, mesh, x.placements, run_check=False)


def spread_experts(layer: Any, x: Any, splits: List[int]) -> Tensor:
    """The products of experts whose weights are DTensors, each worker with a part of every expert.
    Every worker has all tokens, because their numbers for experts are those of all.
    """
    weights = [getattr(layer, name) for name in layer.weights()]
    if any(layer.main_of(weight) is not None for weight in weights):
        raise NotImplementedError(
            f"{layer.path}: main_grad of experts that are DTensors; leave out fuse_wgrad_accumulation"
        )
    mesh, (part,) = _checked_mesh(x, weights[0]), weights[0].placements
    workers, last = Workers(mesh.get_group()), x.ndim - 1
    output: Any
    if part.is_shard(0):
        parallel, output = Parallel("column", workers, sums="leave"), Shard(last)
        x = x.redistribute(placements=[Replicate()])
        tokens = x.to_local(grad_placements=[Partial()])
    elif part.is_shard(1):
        parallel, output = Parallel("row", workers, sums="leave"), Partial()
        x = x.redistribute(placements=[Shard(last)])
        tokens = x.to_local()
    else:
        raise ValueError(
            f"{layer.path}: weights with the placement {part}; there are Shard(0), Shard(1)"
        )
    layer._parallel = {expert: parallel for expert in range(len(weights))}
    biases = [layer._bias(expert) for expert in range(len(weights))]
    each = zip(tokens.reshape(-1, tokens.shape[-1]).split(splits), weights, biases)
    y = torch.cat([
        layer.product(of, weight.to_local(), None if bias is None else bias.to_local(), expert)
        for expert, (of, weight, bias) in enumerate(each)
    ])  # fmt: skip
    return DTensor.from_local(y.view(*x.shape[:-1], y.shape[-1]), mesh, [output], run_check=False)


def _checked_mesh(x: Any, weight: Any) -> Any:
    """The mesh of a weight that goes with an input."""
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
    return mesh


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

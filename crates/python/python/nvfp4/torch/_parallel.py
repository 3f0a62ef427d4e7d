"""``y = x·wᵀ + bias`` where workers of a group have parts of the weight, and its gradient.

| mode | a worker has | y | dx | dw |
|---|---|---|---|---|
| "column" | some outputs: rows of w | its features | the sum of all | its rows |
| "row" | some inputs: columns of w, features of x | the sum of all | its features | its columns |

With ``sequence``, tokens are split outside of the product: x of "column" and dy of "row" are
gathered, and sums are scattered. What is gathered travels as codes: each worker quantizes its
tokens with the amax of all. So every operand has the codes that one process would give it, as long
as each worker has whole blocks. Sums over workers are added in high precision, in the type of x.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Split
from ._composed import arrays_of, matmul, quantized
from ._finite import Watch, Watched
from ._formats import Format, Formats
from ._main_grad import Later, dtype_of, settled
from ._once import once
from ._quantized import coded as coded_of
from ._sizes import padded
from ._travel import receive, send


class Workers:
    """A process group. Copies of a layer keep it, pickles do not: another process has its own."""

    def __init__(self, group: Any):
        self.group = group

    def __deepcopy__(self, memo: Any) -> "Workers":
        return self

    def __reduce__(self):
        return type(None), ()


class Parallel(NamedTuple):
    """How a product is split: ``mode`` is "column" or "row". ``sums`` is "reduce", or "leave" if
    the caller adds what workers have of a sum.
    """

    mode: str
    workers: Optional[Workers]
    sequence: bool = False
    sums: str = "reduce"

    @property
    def group(self) -> Any:
        if self.workers is None:
            raise RuntimeError(
                "a layer with parts of a weight has no process group (it is not in pickles): "
                "set it with set_tensor_parallel_group, or parallelize the model again"
            )
        return self.workers.group

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def summed(self, y: Tensor) -> Tensor:
        """The sum over workers, of which each has its tokens if they are split."""
        if self.sums == "leave":
            return y
        if not self.sequence:
            dist.all_reduce(y, group=self.group)
            return y
        if y.shape[0] % self.size:
            raise ValueError(f"{y.shape[0]} tokens do not divide among {self.size} workers")
        mine = y.new_empty((y.shape[0] // self.size, y.shape[1]))
        dist.reduce_scatter_tensor(mine, y.contiguous(), group=self.group)
        return mine


class Settings(NamedTuple):
    """What a layer says about its product."""

    formats: Formats
    seed: int
    state: Any
    watch: Watch
    parallel: Parallel
    # The workers with other tokens that agree on amaxes.
    data: Tuple[Any, ...]

    def watched(self, slot: str) -> Optional[Watched]:
        return self.watch.of(slot) if self.formats.finite == "refuse" else None


def gathered(x: Tensor, group: Any) -> Tensor:
    """The rows of all workers, one after the other."""
    count = dist.get_world_size(group)
    whole = x.new_empty((x.shape[0] * count, *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def gathered_arrays(
    arrays: List[Tensor], spec: str, side: str, matrix: Tuple[int, int], group: Any
) -> List[Tensor]:
    """The arrays of a direction of all workers' rows, as codes: one gather."""
    sent, freight = send(arrays, spec, side, matrix)
    return receive(gathered(sent, group), freight)[0]


class Operand(NamedTuple):
    """A quantized tensor of tokens: the arrays of its directions (the numbers themselves, where it
    is not quantized), and the tokens that they are of. ``spread``: they are this worker's, of those
    of all.
    """

    row: List[Tensor]
    column: List[Tensor]
    format: Format
    tokens: int
    features: int
    spread: bool

    def whole(self, side: str, parallel: Parallel) -> Tuple[List[Tensor], Tuple[int, int]]:
        """The arrays of a direction of all tokens, and the shape of the tensor."""
        arrays, matrix = self.row if side == "row" else self.column, (self.tokens, self.features)
        if not self.spread:
            return arrays, matrix
        whole = gathered_arrays(arrays, self.format.spec, side, matrix, parallel.group)
        return whole, (self.tokens * parallel.size, self.features)


def operand(
    x: Tensor, format: Format, settings: Settings, slot: str, split: Split,
    offset: Optional[Tensor], gather: bool, alignment: int,
) -> Operand:  # fmt: skip
    """A tensor of tokens, quantized by this worker. Where tokens of all are to be gathered and
    cannot travel as codes, they travel as they are, before they are quantized.
    """
    parallel = settings.parallel
    local = "high-precision" in format.spec or "local" in format.spec
    spread = gather and not local and x.shape[0] % alignment == 0 and parallel.size > 1
    if gather and not spread:
        x = gathered(x, parallel.group)
    if gather and spread:
        split = split._replace(rows=(parallel.group, *split.rows))
    # Parts of a tensor draw numbers of their own.
    part = spread or parallel.group in split.cols
    seed = settings.seed + (dist.get_rank(parallel.group) if part else 0)
    kept = getattr(settings.state, slot)
    given = (format, seed, offset, split, kept, settings.watched(slot), alignment)
    arrays = quantized(x.contiguous(), *given)
    column = arrays[format.row :] if format.column else arrays
    tokens = padded(x.shape[0], alignment)
    return Operand(arrays[: format.row], column, format, tokens, x.shape[1], spread)


def forward(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: Settings, trains: bool
) -> Tuple[Tensor, Operand, List[Tensor]]:
    formats, _, state, _, parallel, data = settings
    x_format, w_format = (
        (formats.input, formats.weight) if trains else (formats.input_row, formats.weight_row)
    )
    column = parallel.mode == "column"
    gather = column and parallel.sequence
    x_split = Split(data, () if column else (parallel.group,))
    alignment = formats.alignment if trains else 1
    xq = operand(x, x_format, settings, "input", x_split, None, gather, alignment)
    coded = coded_of(weight)
    if coded is None:
        w_split = Split((parallel.group,)) if column else Split((), (parallel.group,))
        watched = settings.watched("weight")
        wq = quantized(weight, w_format, group=w_split, kept=state.weight, watched=watched)
    else:
        wq = arrays_of(coded, w_format.directions)
    tokens = x.shape[0] * (parallel.size if gather else 1)
    row, matrix = xq.whole("row", parallel)
    y = matmul(
        row, x_format.spec, "row", matrix, wq[: w_format.row], w_format.spec, "row", weight.shape,
        bias if column else None, x.dtype, formats.accumulators[0], tokens,
    )  # fmt: skip
    if not column:
        # Of a sum that is left, the first worker adds the bias.
        y = parallel.summed(y)
        adds = parallel.sums == "reduce" or dist.get_rank(parallel.group) == 0
        y = y if bias is None or not adds else y + bias.to(y.dtype)
    return y, xq, wq


class Parallelized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offset, settings, main, later):
        formats = settings.formats
        y, xq, wq = forward(x, weight, bias, settings, True)
        wq = wq[formats.weight.row :] if formats.weight.column else wq
        # The backward pass reads columns, of this worker's tokens alone if those of all are spread.
        ctx.save_for_backward(offset, *xq.column, *wq)
        rest = xq._replace(row=[], column=[])
        ctx.call = (settings, len(xq.column), rest, weight.shape, main, later)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once
    def backward(ctx, dy):
        settings, number, xq, w_shape, main, later = ctx.call
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        formats, _, _, _, parallel, data = settings
        offset, *arrays = ctx.saved_tensors
        columns, wq = arrays[:number], arrays[number:]
        dx = dw = db = None
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            column, format = parallel.mode == "column", formats.grad_output
            gather = parallel.sequence and not column
            split = Split(data, (parallel.group,) if column else ())
            given = (format, settings, "grad_output", split, offset, gather, formats.alignment)
            dyq = operand(dy, *given)
            tokens = dy.shape[0] * (parallel.size if gather else 1)
        if ctx.needs_input_grad[0]:
            row, matrix = dyq.whole("row", parallel)
            dx = matmul(
                row, format.spec, "row", matrix, wq, formats.weight.spec, "column", w_shape,
                None, x_dtype, formats.accumulators[1], tokens,
            )  # fmt: skip
            dx = parallel.summed(dx) if column else dx
        if ctx.needs_input_grad[1]:
            other, x_shape = xq._replace(column=columns).whole("column", parallel)
            mine, dy_shape = dyq.whole("column", parallel)
            dtype, sums = dtype_of(main, w_dtype), formats.accumulators[2]
            dw = settled(main, later, lambda: matmul(
                mine, format.spec, "column", dy_shape, other, formats.input.spec, "column", x_shape,
                None, dtype, sums,
            ))  # fmt: skip
        return dx, dw, db, None, None, None, None


def parallel_linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: Settings, trains: bool,
    offset: Optional[Tensor], main: Optional[Tensor], later: Optional[Later],
) -> Tensor:  # fmt: skip
    """The product of a matrix x."""
    if trains:
        return Parallelized.apply(x, weight, bias, offset, settings, main, later)
    return forward(x, weight, bias, settings, False)[0]

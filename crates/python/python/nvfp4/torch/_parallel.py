"""``y = x·wᵀ + bias`` where workers of a group have parts of the weight, and its gradient.

| mode | a worker has | y | dx | dw |
|---|---|---|---|---|
| "column" | some outputs: rows of w | its features | the sum of all | its rows |
| "row" | some inputs: columns of w, features of x | the sum of all | its features | its columns |

With ``sequence``, tokens are split outside of the product: x of "column" and dy of "row" are
gathered, and sums are scattered. What is gathered travels as codes: each worker quantizes its
tokens with the amax of all. So every operand has the codes that one process would give it, as long
as each worker has whole blocks. Sums over workers are added in high precision, in the type of x.

What workers do together goes on beside products and quantizers where the order of these allows it.
A weight is quantized once for all micro-batches of a step, but takes part in every agreement:
whether its codes are still there is a worker's own affair, and all must agree equally often.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ._agree import Amaxes, Part, Split, agreed, agreeing, begun
from ._composed import arrays_of, matmul, part_of
from ._finite import Watch, Watched
from ._formats import Format, Formats
from ._kept import Kept
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
    the caller adds what workers have of a sum. ``lives`` is what codes of the weight may be kept
    beside, if that is not the weight.
    """

    mode: str
    workers: Optional[Workers]
    sequence: bool = False
    sums: str = "reduce"
    lives: Optional[Tensor] = None

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

    def summing(self, y: Tensor) -> Callable[[], Tensor]:
        """The sum over workers, of which each has its tokens if they are split. It is begun, and
        there when it is asked for.
        """
        if self.sums == "leave":
            return lambda: y
        if not self.sequence:
            return _after(begun(dist.all_reduce, y, group=self.group), y)
        if y.shape[0] % self.size:
            raise ValueError(f"{y.shape[0]} tokens do not divide among {self.size} workers")
        mine, y = y.new_empty((y.shape[0] // self.size, y.shape[1])), y.contiguous()
        return _after(begun(dist.reduce_scatter_tensor, mine, y, group=self.group), mine, y)


class Settings(NamedTuple):
    """What a layer says about its product."""

    formats: Formats
    seed: int
    state: Any
    watch: Watch
    parallel: Parallel
    # The workers with other tokens that agree on amaxes.
    data: Tuple[Any, ...]
    # What keeps the codes of the weight, if they can be kept.
    kept: Optional[Kept] = None

    def watched(self, slot: str) -> Optional[Watched]:
        return self.watch.of(slot) if self.formats.finite == "refuse" else None


def _after(wait: Callable[[], Any], y: Tensor, *used: Tensor) -> Callable[[], Tensor]:
    """Gives a tensor when it is there, and keeps what it is made of until then."""

    def finish(_: Tuple[Tensor, ...] = used) -> Tensor:
        wait()
        return y

    return finish


def gathered(x: Tensor, group: Any) -> Tensor:
    """The rows of all workers, one after the other."""
    return gathering(x, group)()


def gathering(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """The same, begun."""
    count, x = dist.get_world_size(group), x.contiguous()
    whole = x.new_empty((x.shape[0] * count, *x.shape[1:]))
    return _after(begun(dist.all_gather_into_tensor, whole, x, group=group), whole, x)


def gathering_arrays(
    arrays: List[Tensor], spec: str, side: str, matrix: Tuple[int, int], group: Any
) -> Callable[[], List[Tensor]]:
    """The arrays of a direction of all workers' rows, as codes: one gather, begun."""
    sent, freight = send(arrays, spec, side, matrix)
    arrived = gathering(sent, group)
    return lambda: receive(arrived(), freight)[0]


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

    def whole(self, side: str, parallel: Parallel) -> Callable[[], List[Tensor]]:
        """The arrays of a direction of all tokens. Their gather is begun."""
        arrays, matrix = self.row if side == "row" else self.column, (self.tokens, self.features)
        if not self.spread:
            return lambda: arrays
        return gathering_arrays(arrays, self.format.spec, side, matrix, parallel.group)

    def shape(self, parallel: Parallel) -> Tuple[int, int]:
        """The shape of the tensor with all tokens."""
        return (self.tokens * parallel.size if self.spread else self.tokens, self.features)


class Tokens(NamedTuple):
    """A tensor of tokens that this worker is to quantize: an :class:`Operand` without arrays."""

    part: Part
    tokens: int
    spread: bool

    @property
    def agrees(self) -> bool:
        return any(self.part.groups)

    def operand(self, amaxes: Amaxes) -> Operand:
        format = self.part.format
        arrays = self.part.quantize(*amaxes)
        column = arrays[format.row :] if format.column else arrays
        features = self.part.x.shape[1]
        return Operand(arrays[: format.row], column, format, self.tokens, features, self.spread)


def tokens_of(
    x: Tensor, format: Format, settings: Settings, slot: str, split: Split,
    offset: Optional[Tensor], gather: bool, alignment: int,
) -> Tokens:  # fmt: skip
    """A tensor of tokens, to be quantized by this worker. Where tokens of all are to be gathered and
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
    return Tokens(part_of(x.contiguous(), *given), padded(x.shape[0], alignment), spread)


class Stored(NamedTuple):
    """What is kept of a worker's part of a weight: its arrays, and its own amaxes."""

    row: List[Tensor]
    column: Optional[List[Tensor]]
    amaxes: Amaxes


def weight_of(weight: Tensor, format: Format, settings: Settings) -> Part:
    """A worker's part of a weight. It is quantized once, as long as nothing changes it."""
    parallel, state, kept = settings.parallel, settings.state.weight, settings.kept
    group = (parallel.group,)
    split = Split(group) if parallel.mode == "column" else Split((), group)
    given = {"group": split, "kept": state, "watched": settings.watched("weight")}
    part = part_of(weight, format, **given)
    imagined = isinstance(weight, FakeTensor)
    plain = "high-precision" in format.spec  # a copy, as large as the weight
    if kept is None or state is not None or part.waits or imagined or plain or format.rounding == "stochastic":
        return part
    lives, both = weight if parallel.lives is None else parallel.lives, format.directions == "both"
    # Of a DTensor, some changes are counted by itself, others by its part.
    key, lives = f"{format.spec} {lives._version}", getattr(lives, "_local_tensor", lives)
    stored = kept.find(lives, key, columns=both)
    if stored is not None:
        arrays = stored.row + (stored.column or [] if both else [])
        return part._replace(quantize=lambda *_: arrays, known=stored.amaxes)
    amaxes = part.amaxes()

    def quantize(*of_all: Optional[Tensor]) -> List[Tensor]:
        made = part.quantize(*of_all)
        column = made[format.row :] if both else None
        kept.keep(lives, key, Stored(made[: format.row], column, amaxes))
        return made

    return part._replace(quantize=quantize, known=amaxes)


def forward(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: Settings, trains: bool
) -> Tuple[Tensor, Operand, List[Tensor]]:
    formats, parallel, data = settings.formats, settings.parallel, settings.data
    x_format, w_format = (
        (formats.input, formats.weight) if trains else (formats.input_row, formats.weight_row)
    )
    column = parallel.mode == "column"
    gather = column and parallel.sequence
    x_split = Split(data, () if column else (parallel.group,))
    alignment = formats.alignment if trains else 1
    mine = tokens_of(x, x_format, settings, "input", x_split, None, gather, alignment)
    coded = coded_of(weight)
    parts = [] if coded is not None else [weight_of(weight, w_format, settings)]
    if mine.agrees:  # on both at once
        of_x, *of_w = agreed([mine.part, *parts])
        xq = mine.operand(of_x)
        row = xq.whole("row", parallel)
    else:
        of_weight = agreeing(parts)
        xq = mine.operand([None, None])
        row = xq.whole("row", parallel)
        of_w = of_weight()
    wq = parts[0].quantize(*of_w[0]) if coded is None else arrays_of(coded, w_format.directions)
    tokens = x.shape[0] * (parallel.size if gather else 1)
    y = matmul(
        row(), x_format.spec, "row", xq.shape(parallel),
        wq[: w_format.row], w_format.spec, "row", weight.shape,
        bias if column else None, x.dtype, formats.accumulators[0], tokens,
    )  # fmt: skip
    if not column:
        # Of a sum that is left, the first worker adds the bias.
        y = parallel.summing(y)()
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
        formats, parallel, data = settings.formats, settings.parallel, settings.data
        offset, *arrays = ctx.saved_tensors
        xq, wq = xq._replace(column=arrays[:number]), arrays[number:]
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        column, format, dw, db = parallel.mode == "column", formats.grad_output, None, None
        if needs_w:
            x_column = xq.whole("column", parallel)
        if needs_x or needs_w:
            gather = parallel.sequence and not column
            split = Split(data, (parallel.group,) if column else ())
            given = (format, settings, "grad_output", split, offset, gather, formats.alignment)
            mine = tokens_of(dy, *given)
            amaxes = agreeing([mine.part])
        if bias_dtype is not None and needs_b:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        if needs_x or needs_w:
            dyq = mine.operand(amaxes()[0])
            tokens, dy_shape = dy.shape[0] * (parallel.size if gather else 1), dyq.shape(parallel)
        row = dyq.whole("row", parallel) if needs_x else None
        dy_column = dyq.whole("column", parallel) if needs_w else None
        dx = None
        if row is not None:
            made = matmul(
                row(), format.spec, "row", dy_shape, wq, formats.weight.spec, "column", w_shape,
                None, x_dtype, formats.accumulators[1], tokens,
            )  # fmt: skip
            dx = parallel.summing(made) if column else lambda: made
        if dy_column is not None:
            of_dy, of_x = dy_column(), x_column()
            dtype, sums = dtype_of(main, w_dtype), formats.accumulators[2]
            dw = settled(main, later, lambda: matmul(
                of_dy, format.spec, "column", dy_shape,
                of_x, formats.input.spec, "column", xq.shape(parallel), None, dtype, sums,
            ))  # fmt: skip
        return None if dx is None else dx(), dw, db, None, None, None, None


def parallel_linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: Settings, trains: bool,
    offset: Optional[Tensor], main: Optional[Tensor], later: Optional[Later],
) -> Tensor:  # fmt: skip
    """The product of a matrix x."""
    if trains:
        return Parallelized.apply(x, weight, bias, offset, settings, main, later)
    return forward(x, weight, bias, settings, False)[0]

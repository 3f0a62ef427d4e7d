"""``y = x·wᵀ + bias`` of experts that workers have some of each, and its gradient.

| way | a worker has | travels |
|---|---|---|
| "dispatch" | some tokens of x, then those of its experts of y | x to its experts, dx back |
| "combine" | those of its experts of x, then its own tokens of y | y back, dy to its experts |

What goes to experts travels as codes: each worker quantizes its own tokens for an expert with the
amax of all of them, x in the forward pass and dy in the backward pass. So an expert has the codes
that one process would give it, as long as each worker has whole blocks of tokens for it; where it
has not, they are filled up with zeros. What comes back is a sum in high precision and stays so.
"""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._agree import Split
from ._composed import arrays_of, matmul, quantized, quantized_together
from ._finite import Watch
from ._formats import Format, Formats
from ._main_grad import added, dtype_of
from ._once import once
from ._quantized import coded as coded_of
from ._routes import Padding, Passage
from ._sizes import padded
from ._travel import block_rows, join, send, sent_bytes


class Call(NamedTuple):
    """What a layer says about the products of its experts."""

    passage: Passage
    formats: List[Formats]
    seed: int
    watches: List[Watch]
    # The workers with other tokens for the same experts that agree on amaxes.
    data: Tuple[Any, ...]
    # Weights whose gradients go into ``main_grad``.
    mains: List[Optional[Tensor]]

    def watched(self, slot: str) -> List[Any]:
        return [
            watch.of(slot) if formats.finite == "refuse" else None
            for formats, watch in zip(self.formats, self.watches)
        ]


class Tokens(NamedTuple):
    """Quantized tokens of experts: the arrays of each, and how many rows they have. ``sent``: they
    are this worker's tokens for all experts, of those that the others have.
    """

    arrays: List[List[Tensor]]
    formats: List[Format]
    rows: List[int]
    features: int
    sent: bool

    def columns(self) -> "Tokens":
        """Their column direction alone."""
        each = zip(self.arrays, self.formats)
        return self._replace(arrays=[arrays[of.row :] for arrays, of in each])

    def taken(self, sides: Sequence[str], padding: Padding, passage: Passage) -> List[List[List[Tensor]]]:
        """The arrays of these directions of the tokens of this worker's experts: one exchange."""
        cut = [[self._side(at, side) for side in sides] for at in range(len(self.arrays))]
        if not self.sent:
            return [[arrays[i] for arrays in cut] for i in range(len(sides))]
        routes = passage.routes
        freights, bytes = [], []
        for arrays, format, rows in zip(cut, self.formats, self.rows):
            packed = [
                send(of, format.spec, side, (rows, self.features)) for of, side in zip(arrays, sides)
            ]
            bytes.append(torch.cat([piece for piece, _ in packed]))
            freights.append([freight for _, freight in packed])
        mine = range(routes.rank * routes.experts, (routes.rank + 1) * routes.experts)
        specs = [self.formats[at].spec for at in mine]
        sizes = [
            [[sent_bytes(spec, side, (rows, self.features)) for side in sides] for spec, rows in zip(specs, of)]
            for of in padding.received
        ]
        arrived = routes.pieces(bytes, [[sum(each) for each in of] for of in sizes])
        found: List[List[List[Tensor]]] = [[] for _ in sides]
        for expert, pieces in enumerate(arrived):
            rows_of = [of[expert] for of in padding.received]
            apart = [piece.split(of[expert]) for piece, of in zip(pieces, sizes)]
            for i, of_side in enumerate(zip(*apart)):
                found[i].append(join(of_side, rows_of, freights[mine[expert]][i]))
        return found

    def _side(self, at: int, side: str) -> List[Tensor]:
        arrays, format = self.arrays[at], self.formats[at]
        if len(arrays) != format.row + format.column:  # the column direction alone
            return arrays
        return arrays[: format.row] if side == "row" else arrays[format.row :]


def alignment(formats: Sequence[Formats], trains: bool) -> int:
    """How many tokens of a worker for an expert make whole blocks."""
    if not trains:
        return math.lcm(*(block_rows(of.input_row.spec, "row") for of in formats))
    steps = [[of.alignment, block_rows(of.input.spec), block_rows(of.grad_output.spec)] for of in formats]
    return math.lcm(*(step for of in steps for step in of))


def quantize_tokens(
    x: Tensor, slot: str, formats: List[Format], call: Call, offsets: Optional[Tensor], padding: Padding, step: int
) -> Tokens:
    """The tokens of a tensor: those that this worker sends to experts, or those of its experts."""
    routes, sent = call.passage.routes, (slot == "input") == (call.passage.way == "dispatch")
    times = routes.size if sent else 1
    x, numbers = (x, routes.sent) if sent else (padding.put(x), padding.here)
    drawn = [None] * len(numbers) if offsets is None else list(offsets.split(1))
    arrays = quantized_together(
        [part.contiguous() for part in x.split(numbers)], formats * times,
        call.seed + routes.rank, drawn, Split((routes.group, *call.data) if sent else call.data),
        call.watched(slot) * times, step,
    )  # fmt: skip
    rows = [padded(number, step) for number in numbers]
    return Tokens(arrays, formats * times, rows, x.shape[1], sent)


def forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]], call: Call, trains: bool
) -> Tuple[Tensor, Tokens, List[List[Tensor]], Padding]:
    step = alignment(call.formats, trains)
    padding = Padding.of(call.passage.routes, step, x.device)
    x_formats = [of.input if trains else of.input_row for of in call.formats]
    w_formats = [of.weight if trains else of.weight_row for of in call.formats]
    xq = quantize_tokens(x, "input", x_formats, call, None, padding, step)
    wq = []
    for weight, format, watched in zip(weights, w_formats, call.watched("weight")):
        coded = coded_of(weight)
        wq.append(quantized(weight, format, watched=watched) if coded is None else arrays_of(coded, format.directions))
    (rows,) = xq.taken(["row"], padding, call.passage)
    outputs = [
        matmul(
            row, x_format.spec, "row", (tokens, x.shape[1]), w[: w_format.row], w_format.spec, "row", weight.shape,
            bias, x.dtype, of.accumulators[0], tokens,
        )
        for row, tokens, x_format, w, w_format, weight, bias, of in zip(
            rows, padding.here, x_formats, wq, w_formats, weights, biases, call.formats
        )
    ]  # fmt: skip
    y = padding.take(torch.cat(outputs))
    return y if call.passage.way == "dispatch" else call.passage.routes.to_tokens(y), xq, wq, padding


class Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, call, *parameters):
        count = len(call.formats)
        weights, biases = parameters[:count], parameters[count:]
        y, xq, wq, padding = forward(x, weights, biases, call, True)
        # The backward pass reads columns: of this worker's own tokens, if they were sent.
        xq = xq.columns()
        wq = [w[of.weight.row :] for w, of in zip(wq, call.formats)]
        ctx.save_for_backward(offsets, *(a for arrays in (*xq.arrays, *wq) for a in arrays))
        ctx.numbers = [len(arrays) for arrays in (*xq.arrays, *wq)]
        ctx.call = (call, xq._replace(arrays=[]), padding, weights[0].shape)
        ctx.dtypes = (x.dtype, weights[0].dtype, [None if bias is None else bias.dtype for bias in biases])
        return y

    @staticmethod
    @once
    def backward(ctx, dy):
        call, xq, padding, w_shape = ctx.call
        x_dtype, w_dtype, bias_dtypes = ctx.dtypes
        offsets, *saved = ctx.saved_tensors
        arrays, saved = [], iter(saved)
        for number in ctx.numbers:
            arrays.append([next(saved) for _ in range(number)])
        count, passage = len(call.formats), call.passage
        xq, wq = xq._replace(arrays=arrays[:-count]), arrays[-count:]
        needs_x, _, _, *needs = ctx.needs_input_grad
        dx, dws, dbs = None, [None] * count, [None] * count
        if any(needs[count:]):
            dbs = _bias_gradients(dy, bias_dtypes, passage)
        needs_w = any(needs[:count])
        sides = ["row"] * needs_x + ["column"] * needs_w
        if sides:
            formats = [of.grad_output for of in call.formats]
            step = alignment(call.formats, True)
            dyq = quantize_tokens(dy, "grad_output", formats, call, offsets, padding, step)
            taken = dict(zip(sides, dyq.taken(sides, padding, passage)))
            shapes = [(tokens, dy.shape[1]) for tokens in padding.here]
        if needs_x:
            dx = torch.cat([
                matmul(
                    row, format.spec, "row", shape, w, of.weight.spec, "column", w_shape,
                    None, x_dtype, of.accumulators[1], shape[0],
                )
                for row, format, shape, w, of in zip(taken["row"], formats, shapes, wq, call.formats)
            ])  # fmt: skip
            dx = padding.take(dx)
            dx = passage.routes.to_tokens(dx) if passage.way == "dispatch" else dx
        if needs_w:
            (columns,) = xq.taken(["column"], padding, passage)
            for at, (of, main) in enumerate(zip(call.formats, call.mains)):
                if needs[at]:
                    dws[at] = added(main, matmul(
                        taken["column"][at], formats[at].spec, "column", shapes[at],
                        columns[at], of.input.spec, "column", (padding.here[at], xq.features),
                        None, dtype_of(main, w_dtype), of.accumulators[2],
                    ))  # fmt: skip
        return dx, None, None, *dws, *dbs


def _bias_gradients(dy: Tensor, dtypes: List[Any], passage: Passage) -> List[Optional[Tensor]]:
    """The sums of each expert's tokens; workers add what they have of them."""
    routes, combines = passage.routes, passage.way == "combine"
    parts = dy.split(routes.sent if combines else routes.here)
    sums = torch.stack([part.sum(0, dtype=torch.float32) for part in parts])
    sums = routes.sums(sums) if combines else sums
    return [None if dtype is None else of.to(dtype) for of, dtype in zip(sums, dtypes)]


@torch.compiler.disable
def routed_linear(
    x: Tensor, weights: List[Tensor], biases: List[Optional[Tensor]], call: Call
) -> Tensor:
    """The products of a matrix of tokens."""
    parameters = [*weights, *biases]
    if not torch.is_grad_enabled() or not any(of is not None and of.requires_grad for of in (x, *parameters)):
        return forward(x, weights, biases, call, False)[0]
    offsets = None
    if any(of.grad_output.rounding == "stochastic" for of in call.formats):
        # Every tensor of tokens draws numbers of its own.
        dispatches = call.passage.way == "dispatch"
        count = len(call.formats) * (1 if dispatches else call.passage.routes.size)
        offsets = torch.randint(2**62, (count,), device=x.device)
    return Routed.apply(x, offsets, call, *parameters)

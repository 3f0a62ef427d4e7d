"""What of a weight's codes travels between workers that have some of its rows each, and how the
whole is made of it.

A weight whose scales are those of squares, or one for all of it, sends the row direction alone: the
column direction is the same codes, transposed. Of a square's scale, which stands in each of its
rows, one copy travels. All other weights send both directions.
"""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _sizes
from ._blocks import DTYPES, bytes_of, grows, shapes

_SQUARE = 16


class Freight(NamedTuple):
    """What a worker knows of the arrays that it gathers: how they are made, the shape of its own
    part of the matrix, and, by their places, the arrays that all workers have.
    """

    spec: str
    directions: str
    matrix: Tuple[int, int]
    common: Dict[int, Tensor]


def columns_follow(spec: str) -> bool:
    """Whether the column direction is the row direction, transposed."""
    name = spec.partition("(")[0]
    if " / " in spec or "hadamard" in spec:
        return False
    return _squares(spec) or name == "fp8"


def _squares(spec: str) -> bool:
    return spec.startswith("nvfp4(") and "16x16" in spec and " / " not in spec


def block_rows(spec: str, directions: str = "both") -> int:
    """How many rows a part must have a multiple of, so that its blocks are those of the whole."""
    row, column = _sizes._described(spec, directions, "float32")
    steps = [_SQUARE if _squares(spec) else 1]
    for described, axis in ((row, "rows"), (column, "cols")):
        for _, extents in described:
            steps += [step * multiple for name, step, multiple in extents if name == axis]
    return math.lcm(*steps)


def hindrance(
    spec: str, matrix: Tuple[int, int], workers: int, dtype: torch.dtype
) -> Optional[str]:
    """Why the parts of a weight in this type travel as they are; None if they travel as codes."""
    (rows, cols), block = matrix, block_rows(spec)
    if rows % workers or rows // workers % block:
        return f"{rows} rows on {workers} workers are no whole blocks of {block} rows"
    if sent_bytes(spec, "both", (rows, cols)) >= rows * cols * dtype.itemsize:
        return f"codes of both directions are no fewer bytes than {dtype}"
    return None


def sent_bytes(spec: str, directions: str, matrix: Tuple[int, int]) -> int:
    """How many bytes all workers send together."""
    return sum(sent_sizes(spec, directions, matrix))


def sent_sizes(spec: str, directions: str, matrix: Tuple[int, int]) -> List[int]:
    """The bytes of each array that a worker with these rows sends."""
    sent = _sent(spec, directions)
    each = [bytes_of(array) for array in shapes(spec, sent, matrix)]
    if _squares(spec) and directions != "column":
        each[1] //= _SQUARE
    # What does not grow with the rows is known to all.
    return [size for size, dim in zip(each, grows(spec, sent, matrix[1])) if dim is not None]


def _sent(spec: str, directions: str) -> str:
    return "row" if directions == "both" and columns_follow(spec) else directions


def send(
    arrays: Sequence[Tensor], spec: str, directions: str, matrix: Tuple[int, int]
) -> Tuple[Tensor, Freight]:
    """What a worker sends of the arrays of its part, as bytes, and what puts the whole together."""
    sent = _sent(spec, directions)
    arrays = list(arrays[: len(shapes(spec, sent, matrix))])
    dims = grows(spec, sent, matrix[1])
    if _squares(spec) and directions != "column":
        arrays[1] = arrays[1][::_SQUARE]
    # A part's share of an array has its columns side by side only by itself.
    alone = [
        array.contiguous().view(-1).view(torch.uint8)
        for array, dim in zip(arrays, dims)
        if dim is not None
    ]
    common = {at: array for at, array in enumerate(arrays) if dims[at] is None}
    return torch.cat(alone), Freight(spec, directions, matrix, common)


def receive(gathered: Tensor, freight: Freight) -> Tuple[List[Tensor], Tuple[int, int]]:
    """The arrays of the whole, of what all workers sent, one after the other; and its shape."""
    spec, directions, (rows, cols), common = freight
    sent, sizes = _sent(spec, directions), sent_sizes(spec, directions, (rows, cols))
    each_array, dims = shapes(spec, sent, (rows, cols)), grows(spec, sent, cols)
    count = gathered.numel() // sum(sizes)
    pieces = iter(gathered.view(count, -1).split(sizes, 1))
    arrays: List[Tensor] = []
    for at, (dtype, shape) in enumerate(each_array):
        if at in common:
            arrays.append(common[at])
        elif at == 1 and _squares(spec) and directions != "column":
            each = next(pieces).reshape(rows * count // _SQUARE, -1)
            arrays.append(each.repeat_interleave(_SQUARE, 0))
        else:
            piece = next(pieces)
            if dtype != "uint8":  # where a piece begins, numbers of four bytes may not
                piece = piece.clone(memory_format=torch.contiguous_format).view(DTYPES[dtype])
            parts = piece.reshape(count, *shape)
            arrays.append(torch.cat(list(parts.unbind(0)), dims[at] or 0))
    if directions == "both" and columns_follow(spec):
        arrays += _transposed(arrays, spec, (rows * count, cols))
    return arrays, (rows * count, cols)


def join(pieces: Sequence[Tensor], rows: Sequence[int], freight: Freight) -> List[Tensor]:
    """The arrays of one direction of the whole, of what workers with so many rows each sent."""
    spec, side, (_, cols), common = freight
    each = [
        receive(piece, freight._replace(matrix=(number, cols)))[0]
        for piece, number in zip(pieces, rows)
        if number
    ]
    if len(each) == 1:
        return each[0]
    whole, dims = shapes(spec, side, (sum(rows), cols)), grows(spec, side, cols)
    return [
        common[at] if dim is None
        else torch.cat([arrays[at] for arrays in each], dim) if each
        else pieces[0].new_empty(shape, dtype=DTYPES[dtype])
        for at, (dim, (dtype, shape)) in enumerate(zip(dims, whole))
    ]  # fmt: skip


def _transposed(arrays: List[Tensor], spec: str, matrix: Tuple[int, int]) -> List[Tensor]:
    """The arrays of the column direction, of those of the row direction."""
    if not _squares(spec):
        codes, scale = arrays
        return [codes.t().contiguous(), scale]
    (codes, scales, amax), (rows, cols) = arrays, matrix
    each = torch.stack((codes & 15, codes >> 4), -1).reshape(rows, -1)[:, :cols].t()
    each = torch.nn.functional.pad(each, (0, rows % 2))
    turned = scales[::_SQUARE].t().repeat_interleave(_SQUARE, 0)[:cols]
    return [each[:, 0::2] | (each[:, 1::2] << 4), turned.contiguous(), amax]

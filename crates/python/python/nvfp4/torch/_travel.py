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
from ._blocks import DTYPES, bytes_of, scaling_dim, shapes, sharded

_SQUARE = 16


class Freight(NamedTuple):
    """What a worker knows of the arrays that it gathers: how they are made, the shape of its own
    part of the matrix, how many bytes of each array it sends, and, by their places, the arrays that
    all workers have.
    """

    spec: str
    directions: str
    matrix: Tuple[int, int]
    sizes: List[int]
    common: Dict[int, Tensor]


def columns_follow(spec: str) -> bool:
    """Whether the column direction is the row direction, transposed."""
    name = spec.partition("(")[0]
    if " / " in spec or "hadamard" in spec:
        return False
    return _squares(spec) or name == "fp8"


def _squares(spec: str) -> bool:
    return spec.startswith("nvfp4(") and "16x16" in spec and " / " not in spec


def block_rows(spec: str) -> int:
    """How many rows a part must have a multiple of, so that its blocks are those of the whole."""
    row, column = _sizes._described(spec, "both", "float32")
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
    arrays = shapes(spec, _sent(spec, directions), matrix)
    each = [bytes_of(array) for array in arrays]
    if _squares(spec) and directions != "column":
        each[1] //= _SQUARE
    # What does not grow with the rows is known to all.
    twice = shapes(spec, _sent(spec, directions), (2 * matrix[0], matrix[1]))
    return sum(size for size, array, other in zip(each, arrays, twice) if array != other)


def _sent(spec: str, directions: str) -> str:
    return "row" if directions == "both" and columns_follow(spec) else directions


def send(
    arrays: Sequence[Tensor], spec: str, directions: str, matrix: Tuple[int, int]
) -> Tuple[Tensor, Freight]:
    """What a worker sends of the arrays of its part, as bytes, and what puts the whole together."""
    sent = _sent(spec, directions)
    arrays = list(arrays[: len(shapes(spec, sent, matrix))])
    split, common = sharded(arrays, spec, sent, matrix)
    if _squares(spec) and directions != "column":
        arrays[1] = arrays[1][::_SQUARE]
    # A part's share of an array has its columns side by side only by itself.
    alone = [arrays[at].contiguous().view(torch.uint8).reshape(-1) for at in split]
    sizes = [piece.numel() for piece in alone]
    freight = Freight(spec, directions, matrix, sizes, {at: arrays[at] for at in common})
    return torch.cat(alone), freight


def receive(gathered: Tensor, freight: Freight) -> Tuple[List[Tensor], Tuple[int, int]]:
    """The arrays of the whole, of what all workers sent, one after the other; and its shape."""
    spec, directions, (rows, cols), sizes, common = freight
    sent = _sent(spec, directions)
    each_array = shapes(spec, sent, (rows, cols))
    count = gathered.numel() // sum(sizes)
    pieces = iter(gathered.view(count, -1).split(sizes, 1))
    whole = shapes(spec, sent, (rows * count, cols))
    arrays: List[Tensor] = []
    for at, (dtype, shape) in enumerate(each_array):
        if at in common:
            arrays.append(common[at])
        elif at == 1 and _squares(spec) and directions != "column":
            each = next(pieces).reshape(rows * count // _SQUARE, -1)
            arrays.append(each.repeat_interleave(_SQUARE, 0))
        else:
            dim = scaling_dim(shape, whole[at][1]) if count > 1 else 0
            piece = next(pieces)
            if dtype != "uint8":  # where a piece begins, numbers of four bytes may not
                piece = piece.clone(memory_format=torch.contiguous_format).view(DTYPES[dtype])
            parts = piece.reshape(count, *shape)
            arrays.append(torch.cat(list(parts.unbind(0)), dim))
    if directions == "both" and columns_follow(spec):
        arrays += _transposed(arrays, spec, (rows * count, cols))
    return arrays, (rows * count, cols)


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

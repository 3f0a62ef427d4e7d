"""What the block of a direction consists of: its arrays, one after the other."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from nvfp4 import _nvfp4

from . import _sizes

DTYPES = {"uint8": torch.uint8, "float32": torch.float32}


def shapes(spec: str, directions: str, matrix: Tuple[int, int]) -> List[Tuple[str, Tuple[int, ...]]]:
    """Type and shape of the arrays of a matrix: those of the row direction, then of the column."""
    return [(dtype, tuple(shape)) for dtype, shape in _sizes.arrays(spec, directions, matrix, "float32")]


def bytes_of(array: Tuple[str, Tuple[int, ...]]) -> int:
    dtype, shape = array
    return math.prod(shape) * DTYPES[dtype].itemsize


def parts_of(block: Tensor, spec: str, side: str, matrix: Tuple[int, int]) -> List[Tensor]:
    """The arrays in a block, as views of it."""
    begin, parts = 0, []
    for array in shapes(spec, side, matrix):
        begin = _sizes.padded(begin, _nvfp4._block_alignment)
        end = begin + bytes_of(array)
        parts.append(block[begin:end].view(DTYPES[array[0]]).view(array[1]))
        begin = end
    return parts


def block_of(parts: Sequence[Tensor]) -> Tensor:
    """A block of arrays."""
    pieces, length = [], 0
    for part in parts:
        pieces.append(part.new_zeros(-length % _nvfp4._block_alignment, dtype=torch.uint8))
        pieces.append(part.contiguous().view(-1).view(torch.uint8))
        length += sum(piece.numel() for piece in pieces[-2:])
    return torch.cat(pieces)


def scaling_dim(part: Tuple[int, ...], whole: Tuple[int, ...]) -> int:
    """The dimension in which the arrays of a matrix and of some of its rows differ."""
    return next(dim for dim, (a, b) in enumerate(zip(part, whole)) if a != b)


# A number of rows that is whole blocks of every format.
_MANY = 1024


def grows(spec: str, directions: str, cols: int) -> List[Optional[int]]:
    """For each array of a matrix, the dimension that grows with its rows, if one does."""
    some, more = (shapes(spec, directions, (rows, cols)) for rows in (_MANY, 2 * _MANY))
    return [None if a == b else scaling_dim(a[1], b[1]) for a, b in zip(some, more)]

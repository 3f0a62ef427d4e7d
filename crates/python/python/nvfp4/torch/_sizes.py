"""The sizes of what operations give, as formulas: compilers trace with symbols in place of sizes.

Nothing here compares sizes, so no graph depends on what a size happens to be. ``nvfp4.layout`` says
the same of sizes that are numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Dict, List, Sequence, Tuple

from nvfp4 import _nvfp4

_BYTES = {"uint8": 1, "float32": 4, "bfloat16": 2, "float16": 2}
# The type of an array, and the extent of each of its dimensions.
_Arrays = List[Tuple[str, List[Tuple[str, int, int]]]]


def padded(count: int, alignment: int) -> int:
    """A number of tokens in whole blocks."""
    return -(-count // alignment) * alignment


def arrays(spec: str, directions: str, shape: Sequence[int], dtype: str) -> List[Tuple[str, List[int]]]:
    """The arrays of a quantized tensor, as (dtype, shape): those of the row direction, then those
    of the column direction.
    """
    rows, cols = math.prod(shape[:-1]), shape[-1]
    row, column = _described(spec, directions, dtype)
    return [*_shapes(row, rows, cols), *_shapes(column, cols, rows)]


def linear_blocks(formats: str, tokens: int, in_features: int, out_features: int) -> List[int]:
    """Bytes of the blocks that a forward pass gives: the column direction of x, the row direction of
    the weight and its column direction, those of them that the pass asks for.
    """
    _, weight, _, _, after = formats.split(" | ")
    sides = ["row"] * after.endswith(" keep") + ["column"] * (not after.startswith("evaluated"))
    made = [_block(weight, side, out_features, in_features) for side in sides]
    return input_blocks(formats, tokens, in_features) + made


def input_blocks(formats: str, tokens: int, in_features: int) -> List[int]:
    """Those of x alone."""
    input, _, _, _, after = formats.split(" | ")
    return [_block(input, "column", tokens, in_features)] if after.startswith("trained") else []


def blocks(spec: str, directions: str, rows: int, cols: int) -> List[int]:
    """Bytes of the blocks of a matrix, row direction first."""
    return [_block(spec, side, rows, cols) for side in (("row", "column") if directions == "both" else (directions,))]


def _block(spec: str, side: str, rows: int, cols: int) -> int:
    """Bytes of the block of a direction of a matrix: its arrays, each at a multiple."""
    row, column = _described(spec, "both", "float32")
    shapes = _shapes(row, rows, cols) if side == "row" else _shapes(column, cols, rows)
    end = 0
    for dtype, shape in shapes:
        end = padded(end, _nvfp4._block_alignment) + math.prod(shape) * _BYTES[dtype]
    return end


@functools.lru_cache(maxsize=None)
def _described(spec: str, directions: str, dtype: str) -> Tuple[_Arrays, _Arrays]:
    return _nvfp4._extents(spec, directions, dtype)


def _shapes(described: _Arrays, rows: int, cols: int) -> List[Tuple[str, List[int]]]:
    sizes = {"one": 1, "rows": rows, "cols": cols}
    return [(dtype, [_length(sizes, *extent) for extent in extents]) for dtype, extents in described]


def _length(sizes: Dict[str, int], axis: str, step: int, multiple: int) -> int:
    return padded(-(-sizes[axis] // step), multiple)

"""How scales lie: padded to whole tiles of tensor cores, and in their order if one asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ._quantizer import up


def padded(scales: Tensor, rows: int, cols: int) -> Tensor:
    """Scales with zeros up to whole multiples of rows and columns."""
    missing = (
        up(scales.shape[0], rows) - scales.shape[0],
        up(scales.shape[1], cols) - scales.shape[1],
    )
    return torch.nn.functional.pad(scales, (0, missing[1], 0, missing[0]))


def swizzled(scales: Tensor) -> Tensor:
    """Padded scales of rows in the order of tensor cores: tiles of 128 rows and 4 columns, in which
    each row of 16 bytes has the scales of rows 32 apart.
    """
    rows, cols = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, cols // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols)


def unswizzled(scales: Tensor) -> Tensor:
    """The same the other way."""
    rows, cols = scales.shape
    tiles = scales.reshape(rows // 128, cols // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols)

"""What ``torch.load`` may read with ``weights_only``."""

from __future__ import annotations

import torch

from . import _float8, _float8_block, _hybrid, _identity, _mxfp8, _nvfp4_tensor, _tensor
from ._format import DType
from ._quantizer import Quantizer
from ._storage import QuantizedTensorStorage


def allow() -> None:
    """Quantized tensors and their quantizers: they hold arrays and settings alone."""
    formats = (_float8, _float8_block, _hybrid, _identity, _mxfp8, _nvfp4_tensor)
    kinds = (QuantizedTensorStorage, _tensor.QuantizedTensor, Quantizer)
    found = [
        thing
        for module in formats
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, kinds)
    ]
    torch.serialization.add_safe_globals([*found, DType, _tensor.rebuilt])

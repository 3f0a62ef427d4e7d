"""What ``torch.load`` may read with ``weights_only``, and what compilers take as a constant."""

from __future__ import annotations

import torch

from . import _float8, _float8_block, _hybrid, _identity, _mxfp8, _nvfp4_tensor, _tensor
from ._format import DType
from ._quantizer import Quantizer
from ._storage import QuantizedTensorStorage
from ._values import is_constant


def register() -> None:
    """Tells torch of both."""
    allow()
    for cls in (
        _float8.Float8CurrentScalingQuantizer,
        _float8_block.Float8BlockQuantizer,
        _mxfp8.MXFP8Quantizer,
        _nvfp4_tensor.NVFP4Quantizer,
    ):
        is_constant(cls)


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

"""``transformer_engine.pytorch.tensor`` and ``.quantized_tensor``: what is asked about quantized
tensors, beside the classes.
"""

from __future__ import annotations

from typing import Any

import torch

from .._masters import (  # noqa: F401
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)


def is_custom(x: Any = None) -> bool:
    """Whether a quantizer, or a tensor that it made, brings its own product."""
    return x is not None and not isinstance(x, torch.Tensor) and bool(getattr(x, "custom", False))

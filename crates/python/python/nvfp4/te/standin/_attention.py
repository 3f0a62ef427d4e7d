"""``transformer_engine.pytorch.attention.dot_product_attention.utils``: questions about attention."""

from __future__ import annotations

from typing import Optional, Tuple

from .._masks import mask_type, window_of


def check_set_window_size(
    attn_mask_type: str, window_size: Optional[Tuple[int, int]] = None
) -> Tuple[int, int]:
    """How many keys before and after its own a query sees with this mask."""
    return window_of(mask_type(attn_mask_type), window_size)

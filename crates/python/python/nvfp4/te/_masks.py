"""Which keys a query sees: TransformerEngine's masks, windows and biases of attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

MASKS = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
    "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
BIASES = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
Window = Tuple[int, int]


def mask_type(name: str) -> str:
    """The mask of this name, of which some have two."""
    name = name.replace(",", "_")
    name = {"causal_padding": "padding_causal"}.get(name, name)
    if name not in MASKS:
        known = ", ".join(f"'{mask}'" for mask in MASKS)
        raise ValueError(f"unknown attn_mask_type '{name}'; there are {known}")
    return name


def window_of(mask: str, window: Optional[Window]) -> Window:
    """How many keys before and after its own a query sees; -1 for all of them."""
    before, after = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    if "causal" in mask:
        after = 0
    elif (before, after) == (-1, 0):
        after = -1
    if before < -1 or after < -1 or ("causal" not in mask and (before < 0) != (after < 0)):
        raise ValueError(
            f"window_size: expected (-1, -1) or two numbers of keys for '{mask}', got {window}"
        )
    return before, after


def is_bottom_right(mask: str, asked: Optional[bool]) -> bool:
    """Whether the last query's own key is the last key, and not the first query's the first."""
    if mask in ("causal", "padding_causal"):
        return False
    return True if asked is None or mask.endswith("bottom_right") else asked


class Padding(NamedTuple):
    """Which tokens are padding, [sequences, tokens]."""

    queries: Tensor
    keys: Tensor

    def more_keys(self) -> Tensor:
        """How many more keys than queries each sequence has, [sequences, 1, 1, 1]."""
        return (
            self.queries.sum(1) - self.queries.shape[1] - self.keys.sum(1) + self.keys.shape[1]
        ).reshape(-1, 1, 1, 1)


def padding_of_lengths(queries: Tensor, keys: Tensor, longest: Tuple[int, int]) -> Padding:
    def hidden(lengths: Tensor, most: int) -> Tensor:
        return torch.arange(most, device=lengths.device) >= lengths[:, None]

    return Padding(hidden(queries, longest[0]), hidden(keys, longest[1]))


def padding_of_mask(mask: Any, sizes: Tuple[int, int, int]) -> Padding:
    """From TransformerEngine's mask, [sequences, 1, 1, tokens] with True for padding, or from two of
    them, for queries and for keys.
    """
    queries, keys = mask if isinstance(mask, (tuple, list)) else (mask, mask)
    batch = sizes[0]
    try:
        return Padding(
            queries.reshape(batch, sizes[1]).bool(), keys.reshape(batch, sizes[2]).bool()
        )
    except RuntimeError:
        raise ValueError(
            f"attention_mask: expected [{batch}, 1, 1, {sizes[1]}] for queries and [{batch}, 1, 1, {sizes[2]}] for keys, "
            f"one mask if they are the same, got {list(queries.shape)} and {list(keys.shape)}"
        ) from None


def distances(
    sizes: Tuple[int, int], padding: Optional[Padding], bottom_right: bool, device: torch.device
) -> Tensor:
    """How far before a query each key is, [sequences or 1, 1, queries, keys]."""
    query, key = torch.arange(sizes[0], device=device), torch.arange(sizes[1], device=device)
    between = (query[:, None] - key[None, :])[None, None]
    if not bottom_right:
        return between
    return between + (sizes[1] - sizes[0] if padding is None else padding.more_keys())


def seen(
    mask: str, window: Window, bottom_right: bool, sizes: Tuple[int, int],
    padding: Optional[Padding], attention_mask: Any, device: torch.device,
) -> Optional[Tensor]:  # fmt: skip
    """Which keys queries see, [sequences or 1, heads or 1, queries, keys]; None for all."""
    parts = []
    if padding is not None:
        parts.append(~(padding.queries[:, None, :, None] | padding.keys[:, None, None, :]))
    if mask == "arbitrary":
        if attention_mask is None:
            raise ValueError("attn_mask_type='arbitrary' needs an attention_mask")
        parts.append(~attention_mask.bool())
    if window != (-1, -1):
        between = distances(sizes, padding, bottom_right, device)
        if window[0] >= 0:
            parts.append(between <= window[0])
        if window[1] >= 0:
            parts.append(between >= -window[1])
    if not parts:
        return None
    together = parts[0]
    for part in parts[1:]:
        together = together & part
    return together


def alibi_slopes_of(heads: int, device: torch.device) -> Tensor:
    """The slopes of the ALiBi paper: powers of two for whole powers of heads, and every second one
    of twice as many for the rest.
    """
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 / whole * number) for number in range(1, 1 + whole)]
    slopes += [2.0 ** (-4.0 / whole * number) for number in range(1, 1 + 2 * (heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi(slopes: Optional[Tensor], heads: int, between: Tensor) -> Tensor:
    """What is added to scores, [sequences or 1, heads, queries, keys]. Slopes are [heads] or
    [sequences, heads].
    """
    slopes = alibi_slopes_of(heads, between.device) if slopes is None else slopes
    return -between.abs() * slopes.reshape(-1, heads, 1, 1)

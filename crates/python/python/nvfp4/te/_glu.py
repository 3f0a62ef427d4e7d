"""Orders of the rows of gated layers, under TransformerEngine's names."""

from __future__ import annotations

from torch import Tensor


def _swapped(tensor: Tensor, interleave_size: int, halves_first: bool) -> Tensor:
    if interleave_size <= 0 or tensor.shape[0] % (2 * interleave_size):
        raise ValueError(
            f"expected a positive interleave_size and a multiple of twice of it as the first dimension, "
            f"got {interleave_size} and {tensor.shape[0]}"
        )
    blocks = tensor.shape[0] // (2 * interleave_size)
    order = (2, blocks) if halves_first else (blocks, 2)
    return (
        tensor.reshape(*order, interleave_size, *tensor.shape[1:])
        .transpose(0, 1)
        .reshape(tensor.shape)
    )


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Brings the rows of a gate and those of its values, which lie one after the other, into blocks
    of ``interleave_size`` rows in turn.
    """
    return _swapped(tensor, interleave_size, halves_first=True)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Undoes :func:`interleave_glu_tensor`."""
    return _swapped(tensor, interleave_size, halves_first=False)

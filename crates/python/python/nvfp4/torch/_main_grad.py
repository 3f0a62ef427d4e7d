"""Gradients that are added to ``weight.main_grad``, as Megatron keeps them: in its type, float32 as a
rule, with no gradient in the weight's own type in between.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def dtype_of(main: Optional[Tensor], dtype: torch.dtype) -> torch.dtype:
    """The type in which the gradient of a weight is computed."""
    return dtype if main is None else main.main_grad.dtype  # type: ignore[attr-defined]


def added(main: Optional[Tensor], dw: Tensor) -> Optional[Tensor]:
    """Adds a gradient to that of the weight, if there is one to add to. Gives what autograd gets.

    A weight that has ``grad_added_to_main_grad`` is told, and gets zeros, so that hooks on its
    gradient run.
    """
    if main is None:
        return dw
    main.main_grad.add_(dw)  # type: ignore[attr-defined]
    if not hasattr(main, "grad_added_to_main_grad"):
        return None
    main.grad_added_to_main_grad = True
    return dw.new_zeros((), dtype=main.dtype).expand(dw.shape)

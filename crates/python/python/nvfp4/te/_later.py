"""Gradients of weights that are computed later than those of inputs: ``delay_wgrad_compute``."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional

import torch
from torch import Tensor


class Owed(NamedTuple):
    """A gradient that is to be computed: the module as the call had it, and what it needs."""

    module: Any
    number: int
    x: Tensor
    weight: Tensor
    dy: Tensor


class _Noted(torch.autograd.Function):
    """A product's output, whose gradient is noted on its way. The weight is there so that there is
    one where the input needs none.
    """

    @staticmethod
    def forward(ctx, y, weight, x, note):
        ctx.note = note
        ctx.save_for_backward(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.note(x, dy)
        return dy, None, None, None


class Postpones(torch.nn.Module):
    """A module that may leave the gradients of its weights to ``backward_dw()``.

    There each product is computed again for it, with the numbers that it had.
    """

    delay_wgrad_compute: bool = False
    _owed: Optional[List[Owed]] = None
    _after: Optional[List[Callable[[], Any]]] = None

    def postpones(self, delay_wgrad_compute: bool) -> None:
        """Says whether it does."""
        self.delay_wgrad_compute = delay_wgrad_compute
        self._owed, self._after = [], []

    def _postponed(self, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Any, number: int) -> Tensor:
        """A product whose weight gets its gradient later."""
        y = product(x, weight.detach(), bias, number)

        def note(x: Tensor, dy: Tensor) -> None:
            assert self._owed is not None
            self._owed.append(Owed(self, number, x, weight, dy))

        return _Noted.apply(y, weight, x.detach(), note)

    def need_backward_dw(self) -> bool:
        """Whether gradients of weights are left to ``backward_dw()``."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the gradients of weights that the backward passes before left out."""
        owed = list(self._owed or ())
        if self._owed is not None:
            self._owed.clear()  # calls under way note in this list
        for one in owed:
            with torch.enable_grad():
                y = one.module._at_once(one.x, one.weight, None, one.number)
            torch.autograd.backward(y, one.dy)
        for hook in self._after or () if owed else ():
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> None:
        """Has a function called after ``backward_dw()``."""
        assert self._after is not None
        self._after.append(wgrad_accumulation_and_reduce_hook)

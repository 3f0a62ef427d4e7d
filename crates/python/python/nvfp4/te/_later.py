"""Gradients of weights that are computed later than those of inputs: ``delay_wgrad_compute``."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import torch
from torch import Tensor

from nvfp4.torch._main_grad import Store


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


def computed_again(
    store: Store, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Any
) -> Tensor:
    """A product that is computed again for the gradient of its weight: one that exists as codes or
    in parts, or whose quantizers bring their own product.
    """
    y = product(x, weight.detach(), bias)

    def note(x: Tensor, dy: Tensor) -> None:
        def work() -> None:
            with torch.enable_grad():
                torch.autograd.backward(product(x, weight, None), dy)

        store.put(work)

    return _Noted.apply(y, weight, x.detach(), note)


class Postpones(torch.nn.Module):
    """A module that may leave the gradients of its weights to ``backward_dw()``."""

    path: str
    _store: Optional[Store] = None
    _hooks: List[Callable[[], Any]] = []

    def postpones(self, delay_wgrad_compute: bool) -> None:
        """Says whether it does."""
        self._store, self._hooks = Store() if delay_wgrad_compute else None, []
        for name, parameter in self.named_parameters() if delay_wgrad_compute else ():
            if not name.startswith("layer_norm"):
                # As TransformerEngine tells those who reduce gradients.
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def need_backward_dw(self) -> bool:
        """Whether gradients of weights wait for :meth:`backward_dw`."""
        return self._store is not None

    def backward_dw(self) -> None:
        """Computes the gradients of weights that a backward pass has left, that of the first of
        several. It does nothing without ``delay_wgrad_compute``.
        """
        if self._store is None:
            return
        if not self._store.run():
            raise RuntimeError(
                f"{type(self).__name__} '{self.path}': backward_dw() has nothing to compute; it comes "
                "once after each backward pass"
            )
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """Has a function called after each :meth:`backward_dw`."""
        self._hooks.append(wgrad_accumulation_and_reduce_hook)

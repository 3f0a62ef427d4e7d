"""Where gradients of weights go: to autograd, into ``weight.main_grad``, as Megatron keeps them (in
its type, float32 as a rule, with no gradient in the weight's own type in between), or to a list of
what is computed later.
"""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, List, NamedTuple, Optional, Tuple

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


class Store:
    """The gradients of a layer's weights that are computed later, by the backward passes that left
    them. Neither copies of a layer nor pickles have them.
    """

    def __init__(self) -> None:
        self._passes: Deque[Tuple[int, List[Callable[[], None]]]] = deque()

    def put(self, work: Callable[[], None]) -> None:
        number = torch._C._current_graph_task_id()
        if not self._passes or self._passes[-1][0] != number:
            self._passes.append((number, []))
        self._passes[-1][1].append(work)

    def run(self) -> bool:
        """Computes those of the first backward pass. Gives whether there was one."""
        if not self._passes:
            return False
        with torch.no_grad():
            for work in self._passes.popleft()[1]:
                work()
        return True

    def __deepcopy__(self, memo) -> "Store":
        return Store()

    def __reduce__(self):
        return Store, ()


class Later(NamedTuple):
    """Where the gradient of this weight is to wait."""

    store: Store
    weight: Tensor


def settled(
    main: Optional[Tensor], later: Optional[Later], compute: Callable[[], Tensor]
) -> Optional[Tensor]:
    """Computes the gradient of a weight, now or later. Gives what autograd gets."""
    if later is None:
        return added(main, compute())
    weight = later.weight

    def work() -> None:
        dw = compute()
        if main is not None:
            added(main, dw)
        else:
            weight.grad = dw if weight.grad is None else weight.grad + dw

    later.store.put(work)
    return None

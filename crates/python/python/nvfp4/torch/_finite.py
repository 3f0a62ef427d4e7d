"""NaN and infinities, for recipes that refuse them.

On the CPU the call that meets one raises. On a GPU no call waits: a kernel sets a flag, and
:func:`check_finite` reads all flags at once.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

SLOTS = ("input", "weight", "grad_output")


class Watched(NamedTuple):
    """A tensor that must be finite: its name, and its flag on a GPU."""

    name: str
    flag: Optional[Tensor]

    def note(self, flag: Tensor) -> None:
        """Joins what an operation found to what was found before: -1 is nothing."""
        if self.flag is not None:
            self.flag.copy_(torch.maximum(self.flag, flag))


class Watch(NamedTuple):
    """The tensors of a product: their name, with ``{}`` for the slot, and their flags on a GPU."""

    name: str = "{}"
    flags: Optional[Tensor] = None

    def note(self, found: Tensor, first: int = 0) -> None:
        """Joins what an operation found in neighbouring slots, the first of which has this number."""
        if self.flags is not None:
            flags = self.flags[first : first + found.numel()]
            torch.maximum(flags, found, out=flags)

    def of(self, slot: str) -> Watched:
        """One of them."""
        at = SLOTS.index(slot)
        return Watched(self.name.format(slot), None if self.flags is None else self.flags[at : at + 1])


def check_finite(model: torch.nn.Module) -> None:
    """Raises a ValueError that names every tensor that was not finite since the last call, if the
    recipe refuses them.

    Call it once per step, before the optimizer's. It waits for the GPU, with one copy for the whole
    model. On the CPU it does nothing: the call that met such a tensor has raised already. A recipe
    refuses them with ``finite = "refuse"``, or ``recipe.with_finite("refuse")``.

    >>> import torch, nvfp4, nvfp4.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = nvfp4.torch.convert_module(model, nvfp4.Recipe("mxfp8").with_finite("refuse"))
    >>> model(torch.randn(32, 64)).sum().backward()
    >>> nvfp4.torch.check_finite(model)
    """
    from ._delayed import Delays

    modules = [module for module in model.modules() if isinstance(module, Delays)]
    watched = [module.not_finite() for module in modules]
    flags = [flag for flag, _ in watched if flag is not None]
    if not flags:
        return
    seen = torch.cat([flag.to(flags[0].device) for flag in flags]).tolist()
    names = [name for flag, names in watched if flag is not None for name in names]
    found = [_described(name, flag) for name, flag in zip(names, seen) if flag >= 0]
    if found:
        for flag in flags:
            flag.fill_(-1)
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise ValueError(f"expected finite values, got NaN or infinities in {', '.join(found[:8])}{more}")


def _described(name: str, flag: int) -> str:
    """The text of a flag: four times the index of the number, plus its kind."""
    return f"{name} ({('inf', '-inf', 'NaN')[flag % 4]} at {flag // 4})"

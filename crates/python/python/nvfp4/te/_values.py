"""Quantizers that are equal if their settings are, so that compilers take them as constants."""

from __future__ import annotations

import importlib.util
from typing import Any, Dict, Tuple

import torch

from ._format import DType
from ._quantizer import Quantizer


class ValueQuantizer(Quantizer):
    """A quantizer of settings alone."""

    def _settings(self) -> Tuple[Tuple[str, Any], ...]:
        group = getattr(self, "amax_reduction_group", None)
        if isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(
                f"{type(self).__name__} has a process group in amax_reduction_group, which is no "
                "constant of a compiled program: set it on a copy"
            )
        kept = {
            name: value for name, value in self.__dict__.items() if name != "amax_reduction_group"
        }
        return tuple(sorted((n, int(v) if isinstance(v, DType) else v) for n, v in kept.items()))

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        return self._settings() == other._settings()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._settings()))

    def __fx_repr__(self) -> Tuple[str, Dict[str, Any]]:
        name = type(self).__name__
        return f"remade({name}, {self._settings()!r})", {"remade": remade, name: type(self)}


def remade(cls: Any, settings: Tuple[Tuple[str, Any], ...]) -> Any:
    """A quantizer with these settings."""
    made = cls.__new__(cls)
    made.__dict__.update(settings)
    made.dtype = DType.cast(made.dtype)
    if hasattr(made, "with_amax_reduction"):
        made.amax_reduction_group = None
    return made


def is_constant(cls: type) -> None:
    """Tells torch that quantizers of this class are constants, where it knows such objects."""
    known: Any = importlib.util.find_spec("torch._library.opaque_object")
    if known is None:
        return
    known = importlib.import_module("torch._library.opaque_object")
    # Earlier versions have `register_opaque_type`, which takes classes of a metaclass of torch's alone.
    if hasattr(known, "register_custom_class"):
        known.register_custom_class(cls, typ="constant")

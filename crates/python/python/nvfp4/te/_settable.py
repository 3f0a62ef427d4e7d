"""What all modules of TransformerEngine's have beside torch's."""

from __future__ import annotations

from typing import Any

import torch


class Settable(torch.nn.Module):
    """A module whose attributes may be set beside torch."""

    def fast_setattr(self, name: str, value: Any) -> None:
        """Sets an attribute that is neither a parameter, a module nor a property."""
        self.__dict__[name] = value

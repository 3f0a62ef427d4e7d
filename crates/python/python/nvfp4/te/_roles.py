"""What a factory is asked and what it may answer, under TransformerEngine's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional, Union

from ._format import Format, delayed_spec


@dataclass(frozen=True)
class QuantizerRole:
    """Which tensor of which module a quantizer is for; empty where nothing is known."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        known = [f"{name}={value}" for name, value in vars(self).items() if value]
        return "|".join(known) or "QuantizerRole()"


@dataclass(frozen=True)
class QuantizerRequest:
    """What a factory returns for a tensor whose quantizer has a state, which modules keep."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for FP8 with a scale from earlier steps. Every tensor may have settings of its own."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True

    def spec_in(self, direction: str) -> str:
        """The format in recipe syntax, in the "forward" or the "backward" pass."""
        return delayed_spec(self, direction)

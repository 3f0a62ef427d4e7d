"""What a factory is asked and what it may answer, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Optional, Union

import nvfp4

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
        for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
            if callable(getattr(self, name)):
                raise NotImplementedError(
                    f"te.DelayedScalingRequest: {name} is a function; te.DelayedScaling takes it"
                )
        return delayed_spec(self, direction)


# Who takes over the tensors that attention hands over, by their slots.
_edges: contextvars.ContextVar[Mapping[str, QuantizerRole]] = contextvars.ContextVar(
    "nvfp4_te_edges", default={}
)


@contextlib.contextmanager
def handed_to(roles: Mapping[str, QuantizerRole]) -> Iterator[None]:
    """Inside, factories are asked about tensors that are handed over with these roles."""
    token = _edges.set(roles)
    try:
        yield
    finally:
        _edges.reset(token)


def consumer(slot: str, role: QuantizerRole) -> QuantizerRole:
    """The role of who takes over what attention has in a slot; the role itself if nobody does."""
    return _edges.get().get(slot, role)


def spec_of_answer(answer: Any, role: QuantizerRole, direction: str) -> str:
    """The spec of what a factory returned, in the "forward" or the "backward" pass."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, nvfp4.Quantizer):
        return answer.spec
    if isinstance(answer, DelayedScalingRequest):
        return answer.spec_in(direction)
    if isinstance(answer, type):
        raise TypeError(
            f"the factory returned the class {answer.__name__} for {role}: return an object of it, "
            f"as with {answer.__name__}(...)"
        )
    if isinstance(answer, QuantizerRequest) or not hasattr(answer, "spec"):
        raise TypeError(
            f"the factory returned {answer!r} for {role}: expected a quantizer or a DelayedScalingRequest; "
            "IdentityQuantizer() leaves a tensor in high precision"
        )
    return answer.spec()

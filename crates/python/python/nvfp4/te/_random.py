"""Random numbers of parallel workers, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, Set

import torch
from torch import Tensor


def _generator() -> torch.Generator:
    """That of the current GPU, or of the CPU where there is none."""
    if torch.cuda.is_available():
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


class CudaRNGStatesTracker:
    """States of torch's generator by name: what one worker draws and what all of them draw alike.

    It cannot be forked inside of a CUDA graph.

    >>> import torch, nvfp4.te as te
    >>> tracker = te.CudaRNGStatesTracker()
    >>> tracker.add("model-parallel-rng", 7)
    >>> with tracker.fork():
    ...     noise = torch.rand(3)
    """

    def __init__(self) -> None:
        self.states_: Dict[str, Tensor] = {}
        self.seeds_: Set[int] = set()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> Dict[str, Tensor]:
        """The states by name."""
        return dict(self.states_)

    def set_states(self, states: Dict[str, Tensor]) -> None:
        """Puts these states in the place of all."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Begins a state from a seed; neither may be there already."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} is used already: give every state its own")
        if name in self.states_:
            raise RuntimeError(
                f"there is a state '{name}' already: choose another name, or reset() first"
            )
        self.seeds_.add(seed)
        generator = _generator()
        before = generator.get_state()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_state()
        generator.set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside it, torch draws from this state, which moves on; outside it goes on as before."""
        if name not in self.states_:
            raise KeyError(
                f"there is no state '{name}': add() it first; there are {sorted(self.states_)}"
            )
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(before)

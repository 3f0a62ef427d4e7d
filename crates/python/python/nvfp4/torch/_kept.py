"""Weights that are quantized once and serve until they change: all micro-batches of a step,
recomputed passes, evaluation.

A layer keeps the codes of its weight beside it. They are those of one object, one version (torch
counts changes in place) and one place in memory, and they end with a step of any optimizer of
torch, a state dict that is loaded, and :func:`nvfp4.torch.update_scales`. What is written through
``.data`` outside of an optimizer is not counted: :func:`weights_changed` says so.

A compiled or captured pass keeps nothing: what it replays must read the weights of that time.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._quantized import Codes


class _Epoch:
    """Counts what may have changed weights without a trace."""

    now = 0


def weights_may_have_changed(*_: Any) -> None:
    """Ends everything that is kept."""
    _Epoch.now += 1


register_optimizer_step_post_hook(weights_may_have_changed)


class Kept:
    """The codes of one weight. Copies and pickles of it are empty."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self):
        return Kept, ()

    def forget(self) -> None:
        """Drops the codes."""
        # A reference to the weight, its key and the codes, all at once: threads may share a layer.
        self._kept: Optional[Tuple[Any, Tuple, Codes]] = None

    def find(self, weight: Tensor, formats: str, columns: bool) -> Optional[Codes]:
        """The codes, if they are there and still those of this weight in these formats."""
        kept = self._kept
        if kept is None:
            return None
        known, key, codes = kept
        if known() is not weight or key != _key(weight, formats):
            del kept, codes
            self._kept = None  # its memory may serve the ones to come
            return None
        return None if columns and codes.column is None else codes

    def keep(self, weight: Tensor, formats: str, codes: Codes) -> None:
        """Keeps the codes of a weight."""
        self._kept = (weakref.ref(weight), _key(weight, formats), codes)


def can_be_kept(weight: Tensor) -> bool:
    """Whether changes of a weight are seen."""
    if type(weight) is not torch.nn.Parameter or torch.compiler.is_compiling() or weight.is_inference():
        return False
    device = weight.device.type
    return device == "cpu" or (device == "cuda" and not torch.cuda.is_current_stream_capturing())


def _key(weight: Tensor, formats: str) -> Tuple:
    # Another stream would have to wait for the one that made them.
    stream = torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else 0
    # What is made in inference mode cannot be saved for a backward pass.
    return formats, weight._version, weight.data_ptr(), _Epoch.now, stream, torch.is_inference_mode_enabled()

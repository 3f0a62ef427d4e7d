"""Weights that are quantized once and serve until they change: all micro-batches of a step,
recomputed passes, evaluation.

A layer keeps the codes of its weight beside it. They are those of one object, one version (torch
counts changes in place) and one storage. They end with a step of any optimizer of torch, a state
dict that is made or loaded, a parameter that is set, a switch between training and evaluation, and
:func:`nvfp4.torch.update_scales`. What is written through ``.data`` or by a collective operation
outside of an optimizer is not counted: :func:`weights_changed` says so. Those of a DTensor are
of this worker's part, and there as long as nobody else has that memory, as a state dict does.

A compiled or captured pass keeps nothing: what it replays must read the weights of that time. Nor
is anything kept that others change unseen: weights in memory that processes share, and weights on
a GPU once the step of an optimizer is in a graph, which replays it without a word.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Epoch:
    """Counts what may have changed weights without a trace."""

    now = 0
    # Whether the step of an optimizer was captured in a graph.
    replayed = False


def weights_may_have_changed(*_: Any) -> None:
    """Ends everything that is kept."""
    _Epoch.now += 1


def _after_a_step(*_: Any) -> None:
    weights_may_have_changed()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _Epoch.replayed = True


register_optimizer_step_post_hook(_after_a_step)


class Kept:
    """The codes of one weight. Copies and pickles of it are empty."""

    # The weight, its storage, the key and the codes. Threads replace all of it at once.
    __slots__ = ("_held",)

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self):
        return Kept, ()

    def forget(self) -> None:
        """Drops the codes."""
        self._held: Optional[Tuple[Any, StorageWeakRef, Tuple, Any]] = None

    def find(self, weight: Tensor, formats: str, columns: bool) -> Optional[Any]:
        """The codes, if they are there and still those of this weight in these formats."""
        held = self._held
        if held is None:
            return None
        known, storage, key, codes = held
        # The numbers of storages that are referred to differ.
        same = known() is weight and storage.cdata == weight.untyped_storage()._cdata
        if not same or key != _key(weight, formats):
            self._held = None  # its memory may serve the ones to come
            return None
        return None if columns and codes.column is None else codes

    def keep(self, weight: Tensor, formats: str, codes: Any) -> None:
        """Keeps the codes of a weight, or what else has a ``row`` and a ``column``."""
        if not isinstance(codes.row, FakeTensor):  # of a pass that is only imagined
            storage = StorageWeakRef(weight.untyped_storage())
            self._held = weakref.ref(weight), storage, _key(weight, formats), codes


def captured(tensor: Tensor) -> bool:
    """Whether operations on a tensor go into a graph now."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def can_be_kept(weight: Tensor) -> bool:
    """Whether changes of a weight are seen."""
    if torch.compiler.is_compiling() or weight.is_inference():
        return False
    if type(weight) is not torch.nn.Parameter:
        local = getattr(weight, "_local_tensor", None)
        if type(local) is not Tensor or not _alone(local):
            return False
        weight = local
    if captured(weight):
        return False
    if weight.device.type == "cpu":
        return not weight.untyped_storage().is_shared()
    return weight.device.type == "cuda" and not _Epoch.replayed


def _alone(local: Tensor) -> bool:
    """Whether no other tensor has the memory of a DTensor's part. What a state dict has of it may be
    written to uncounted, as ``dcp.load`` does.
    """
    return _ALONE is not None and _users(local) == _ALONE


def _users(tensor: Tensor) -> int:
    """How many refer to the memory of a tensor: itself, and in some versions of torch what Python
    has of it.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# Of memory that one tensor has; None where torch does not count, as before 2.8 without CUDA.
_ALONE = _users(torch.empty(1)) if hasattr(torch._C, "_storage_Use_Count") else None


def _key(weight: Tensor, formats: str) -> Tuple:
    # Another stream would have to wait for the one that made them.
    stream = torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else 0
    # An address may be that of other memory by now: the storage is compared too.
    place = weight.data_ptr(), weight.stride(), weight.dtype
    # What is made in inference mode cannot be saved for a backward pass.
    return formats, weight._version, place, _Epoch.now, stream, torch.is_inference_mode_enabled()

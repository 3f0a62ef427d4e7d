"""``_extra_state`` of TransformerEngine's checkpoints: a pickle with the scales of delayed scaling.

Reading a pickle may run code that is in it, so it is read only if the environment says
``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. What it holds can be told without reading it.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import pickletools
import warnings
from typing import Any, Dict, Set, Tuple

import torch

from nvfp4.torch._delayed import Scale, Scales

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_THEIRS, _OURS = "transformer_engine.common.recipe", "nvfp4.te.recipe"
_KEPT = {f"{what}_{of}" for what in ("scale", "amax_history") for of in ("fwd", "bwd")}


class CheckpointExtraStatePolicy(enum.Enum):
    """What a recipe leaves in a checkpoint."""

    STATELESS = "stateless"
    STATEFUL_FP8_DELAYED_SCALING = "stateful_fp8_delayed_scaling"
    DYNAMIC = "dynamic"


_RECIPE_POLICIES: Dict[Tuple[str, str], CheckpointExtraStatePolicy] = {
    (_THEIRS, "DelayedScaling"): CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING,
    (_THEIRS, "Float8CurrentScaling"): CheckpointExtraStatePolicy.STATELESS,
    (_THEIRS, "MXFP8BlockScaling"): CheckpointExtraStatePolicy.STATELESS,
    (_THEIRS, "Float8BlockScaling"): CheckpointExtraStatePolicy.STATELESS,
    (_THEIRS, "NVFP4BlockScaling"): CheckpointExtraStatePolicy.STATELESS,
    (_THEIRS, "CustomRecipe"): CheckpointExtraStatePolicy.DYNAMIC,
}


def _words(data: bytes) -> Tuple[Set[str], bool]:
    """The texts in a pickle, and whether it names anything that reading it would call."""
    words: Set[str] = set()
    calls = False
    for opcode, argument, _ in pickletools.genops(data):
        calls = calls or opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST")
        if isinstance(argument, str):
            words.update({argument, *argument.split()})
    return words, calls


def _has_no_scales(data: bytes) -> bool:
    """Whether a pickle is known to hold no scales."""
    if not data:
        return True
    try:
        words, calls = _words(data)
    except Exception:  # no pickle
        return False
    if words & _KEPT:
        return False
    if not calls:
        return True
    # The first checkpoints named no recipe, and had delayed scaling alone.
    recipes = {name for _, name in _RECIPE_POLICIES} & words if words & {_THEIRS, _OURS} else set()
    return "recipe" in words and bool(recipes) and "DelayedScaling" not in recipes


def should_load_extra_state_pickle(data: bytes, context: str) -> bool:
    """Whether to read a pickle: not one without scales, and others only if the environment allows
    it.
    """
    if _has_no_scales(data):
        return False
    if os.getenv(UNSAFE_PICKLE_EXTRA_STATE_ENV, "0") == "1":
        return True
    raise RuntimeError(
        f"{context}: the scales of delayed scaling are a pickle, and reading it may run code that "
        f"is in it; if the checkpoint is to be trusted, set {UNSAFE_PICKLE_EXTRA_STATE_ENV}=1"
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_OURS if module == _THEIRS else module, name)


def load_extra_state(module: Any, state: Any) -> None:
    """Gives a module the scales of a checkpoint of TransformerEngine's. Without leave to read them
    they begin anew, which a warning says.
    """
    if isinstance(state, torch.Tensor):
        data = state.detach().cpu().numpy().tobytes()
    elif isinstance(state, io.BytesIO):
        data = state.getvalue()
    else:
        return
    try:
        if not should_load_extra_state_pickle(data, getattr(module, "path", type(module).__name__)):
            return
    except RuntimeError as error:
        warnings.warn(f"{error}. Until then they begin anew", stacklevel=2)
        return
    if isinstance(state, io.BytesIO):  # the form of early versions
        found = torch.load(io.BytesIO(data), "cpu", weights_only=False)
    else:
        found = _Unpickler(io.BytesIO(data)).load()
    places = getattr(module, "_places", None)
    if not isinstance(found, dict) or not _KEPT <= set(found) or places is None:
        return
    device = module._home()
    for mode, end in (("forward", "fwd"), ("backward", "bwd")):
        scales, histories = found[f"scale_{end}"], found[f"amax_history_{end}"]
        for name, at in places(mode).items():
            if at < scales.numel():
                _keep(module, name, scales[at : at + 1], histories[:, at], device)


def _keep(module: Any, name: str, scale: torch.Tensor, history: torch.Tensor, device: Any) -> None:
    if module.delayed is None:
        module.delayed = Scales()
    kept = Scale(None, history.numel(), device)  # the rule comes with the recipe
    kept.scale.copy_(scale)
    kept.history.copy_(history)
    module.delayed.add_module(name, kept)

"""``autocast`` and what modules follow in it, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import warnings
from collections import deque
from typing import Any, Callable, Deque, Dict, NamedTuple, Optional, Tuple

import torch
import torch.utils.checkpoint

import nvfp4
from nvfp4.torch._delayed import update

from ._signature import refuse, supports
from .recipe import MXFP8BlockScaling, Recipe, hand_over_of
from .recipe import of as recipe_of


_numbers = itertools.count()


class Step:
    """An outermost region and the backward pass after it, as delayed scaling sees them.

    It ends when one of its modules is used in another region: then everything that it saw is there,
    and nothing of it is computed again.
    """

    def __init__(self) -> None:
        # Each with the workers that agree on its amaxes.
        self.modules: Dict[int, Tuple[Any, Any]] = {}
        self.ended = False

    def end(self) -> None:
        """Updates the scales of its modules, once."""
        if not self.ended:
            self.ended = True
            update(self.modules.values())


class Region(NamedTuple):
    """What modules follow inside ``autocast``.

    ``key`` stands for the recipe, and is empty outside. Compilers compare it: to them, recipes and
    steps are objects that are new each time. ``hand_over`` says which tensors attention hands over
    quantized: "none", its "output", or "both" this and its gradients. ``calibrating`` says that
    modules compute in high precision, and note the amaxes that the recipe keeps.
    """

    recipe: nvfp4.Recipe
    group: Any = None
    step: Optional[Step] = None
    key: str = ""
    hand_over: str = "none"
    calibrating: bool = False
    # The recipe as it was given; None in high precision.
    asked: Any = None


# The last recipes that regions had, each with its key.
_keys: Deque[Tuple[nvfp4.Recipe, str]] = deque(maxlen=64)
_keys_lock = threading.Lock()


def _key(recipe: nvfp4.Recipe) -> str:
    """The key of a recipe: the same for equal ones, while they are among the last."""
    with _keys_lock:
        for known, key in _keys:
            if known is recipe or known == recipe:
                return key
        key = f"{recipe.name} {next(_numbers)}"
        _keys.append((recipe, key))
        return key


_HIGH_PRECISION = Region(nvfp4.Recipe("high_precision"))
_region: contextvars.ContextVar[Region] = contextvars.ContextVar("nvfp4_te_region", default=_HIGH_PRECISION)


def region() -> Region:
    """What modules follow here."""
    return _region.get()


class autocast(contextlib.ContextDecorator):
    """Inside, modules compute in the formats of a recipe: one of this module's, an ``nvfp4.Recipe``
    or a preset's name; without one, :func:`get_default_recipe`'s.

    ``amax_reduction_group`` is the process group whose workers agree on amaxes. Delayed scaling
    moves on from one outermost region to the next. With ``enabled=False, calibrating=True`` modules
    compute in high precision, and delayed scaling notes the amaxes of inputs and weights. A region
    belongs to the thread, or the task of
    ``asyncio``, that enters it: a thread that is started inside enters its own. It may be entered
    again after it was left.
    """

    @supports("enabled", "calibrating", "recipe", "amax_reduction_group")
    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:  # fmt: skip
        for name, given in (("enabled", enabled), ("calibrating", calibrating)):
            if isinstance(given, (str, Recipe, nvfp4.Recipe, torch.nn.Module)):
                raise TypeError(
                    f"{name}: expected True or False, got {type(given).__name__}; a recipe is the "
                    "argument recipe=, and modules are called inside of the region"
                )
        self._enabled, self._recipe, self._group = enabled, recipe, amax_reduction_group
        # What is quantized notes its amaxes anyway.
        self._calibrating = bool(calibrating) and not enabled
        self._token: Optional[contextvars.Token] = None

    def __enter__(self) -> "autocast":
        if self._token is not None:
            raise RuntimeError("this autocast is entered already: make another one for a region inside of it")
        step = region().step or Step()
        if not self._enabled and not self._calibrating:
            new = _HIGH_PRECISION._replace(step=step, key=_key(_HIGH_PRECISION.recipe))
        else:
            asked = get_default_recipe() if self._recipe is None else self._recipe
            recipe = recipe_of(asked)
            handed = "none" if self._calibrating else hand_over_of(asked)
            new = Region(recipe, self._group, step, _key(recipe), handed, self._calibrating, asked)
        self._token = _region.set(new)
        return self

    def __exit__(self, *_: Any) -> None:
        token, self._token = self._token, None
        assert token is not None
        _region.reset(token)

    def _recreate_cm(self) -> "autocast":
        # As a decorator: every call has a region of its own.
        return autocast(self._enabled, self._calibrating, self._recipe, self._group)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> autocast:
    """The old name of :class:`autocast`."""
    warnings.warn("fp8_autocast is deprecated: use autocast, which it calls", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def get_default_recipe() -> Recipe:
    """The recipe of regions that name none: MXFP8, which TransformerEngine takes where it runs."""
    return MXFP8BlockScaling()


get_default_fp8_recipe = get_default_recipe


@contextlib.contextmanager
def _inside(new: Region):
    token = _region.set(new)
    try:
        yield
    finally:
        _region.reset(token)


def checkpoint(function: Callable, *args, **kwargs):
    """``torch.utils.checkpoint.checkpoint`` for modules that follow ``autocast``: what is computed
    again is computed as it was the first time, with the numbers that ``get_rng_state_tracker()``
    gave then.

    With delayed scaling the backward pass has to come before the next outermost region, which moves
    the scales on.
    """
    use_reentrant = kwargs.pop("use_reentrant", True)
    distributed = kwargs.pop("distribute_saved_activations", False)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    kwargs.pop("tp_group", None)  # of distributed activations alone
    if len(args) > 3 and isinstance(args[0], bool) and callable(args[1]):
        warnings.warn(
            "checkpoint: pass distribute_saved_activations, get_rng_state_tracker and tp_group as keyword arguments",
            DeprecationWarning,
            stacklevel=2,
        )
        distributed, tracker, args = args[0], args[1], args[3:]
    refuse("checkpoint", "distribute_saved_activations", distributed, False)
    here, before = region(), None

    def again(*args, **kwargs):
        nonlocal before
        with contextlib.ExitStack() as stack:
            stack.enter_context(_inside(here))
            if tracker is not None and before is None:
                before = tracker().get_states()
            elif tracker is not None:
                now = tracker().get_states()
                tracker().set_states(dict(before))
                stack.callback(tracker().set_states, now)
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=use_reentrant, **kwargs)

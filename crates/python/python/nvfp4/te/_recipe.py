"""Recipes and ``autocast`` under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import threading
from collections import deque
from dataclasses import dataclass, fields
from typing import Any, Callable, Deque, Dict, NamedTuple, Optional, Tuple

import torch
import torch.utils.checkpoint

import nvfp4
from nvfp4.torch._delayed import update

from ._signature import refuse, supports


@dataclass(frozen=True)
class QuantizerRole:
    """Which tensor of which module a quantizer is for; empty where nothing is known."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return "|".join(text for text in (self.module_type, self.tensor_type, self.name) if text)


@dataclass(frozen=True)
class NVFP4BlockScaling:
    """TransformerEngine's recipe for training in NVFP4, with its switches.

    The environment is not read: see ``nvfp4.Recipe.from_env``.

    Fields are TransformerEngine's. A format of None is E2M1 with E4M3 scales; attention is not
    quantized. Other values are refused.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Any = None
    fp8_format: Any = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None

    def __post_init__(self) -> None:
        _only_defaults(self, "fp4_format", "fp8_format", "fp8_dpa", "fp8_mha")

    def recipe(self) -> nvfp4.Recipe:
        """The recipe that this stands for."""
        switches = []
        if self.disable_rht:
            switches.append('transform = "none"')
        if self.disable_stochastic_rounding:
            switches.append('gradients = "nearest"')
        if self.disable_2d_quantization:
            switches.append('weights = "1x16"')
        if self.row_scaled_activation:
            switches.append('activations = "row-scaled"')
        if self.nvfp4_4over6 != "none":
            switches.append(f'four-over-six = "{self.nvfp4_4over6}"')
            switches.append(f'bound-256 = "{self.nvfp4_4over6_e4m3_use_256}"')
            switches.append(f'metric = "{self.nvfp4_4over6_err_mode.lower()}"')
        text = '[default]\npreset = "nvfp4"\n' + ("[nvfp4]\n" + "\n".join(switches) if switches else "")
        recipe = nvfp4.Recipe.from_toml(text)
        backward = (self.backward_override or "none").replace("_", "-")
        return recipe.with_backward(backward)


def _only_defaults(recipe: Any, *names: str) -> None:
    """Refuses a recipe with a field that this package does not implement."""
    defaults = {field.name: field.default for field in fields(recipe)}
    for name in names:
        refuse(type(recipe).__name__, name, getattr(recipe, name), defaults[name])


_numbers = itertools.count()


@functools.lru_cache(maxsize=64)
def _number(factory: Callable) -> int:
    """The number of a factory: the same for the same one, while it is among the last that were
    used.
    """
    return next(_numbers)


@dataclass(frozen=True)
class CustomRecipe:
    """A recipe from a factory: ``qfactory(role)`` gives the quantizer of a tensor.

    It may return an ``NVFP4Quantizer``, an ``IdentityQuantizer``, an ``nvfp4.Quantizer`` or the
    text of a spec. What it raises becomes a ValueError that names the role. Recipes with the same
    factory and the same settings are equal, and a module asks a factory once: to change the
    answers, pass another factory. Fields are TransformerEngine's; values other than its defaults
    are refused where this package does not implement them.
    """

    qfactory: Callable[[QuantizerRole], Any]
    fp8_format: Any = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        _only_defaults(self, "fp8_format", "fp8_dpa", "fp8_mha", "quantization_alignment")

    @property
    def key(self) -> str:
        """What stands for the factory where recipes are compared."""
        try:
            return f"custom recipe {_number(self.qfactory)}"
        except TypeError:  # it has no hash, so it can only be compared with itself
            return f"custom recipe at {id(self.qfactory)}"

    def recipe(self) -> nvfp4.Recipe:
        """The recipe that this stands for."""

        def spec(asked: nvfp4.Role) -> str:
            role = QuantizerRole(*asked.legacy)
            quantizer = self.qfactory(role)
            if isinstance(quantizer, str):
                return quantizer
            if isinstance(quantizer, nvfp4.Quantizer):
                return quantizer.spec
            if not hasattr(quantizer, "spec"):
                raise TypeError(
                    f"the factory returned {quantizer!r} for {role}: expected a quantizer; "
                    "IdentityQuantizer() leaves a tensor in high precision"
                )
            return quantizer.spec()

        backward = (self.backward_override or "none").replace("_", "-")
        return nvfp4.Recipe.from_function(self.key, spec).with_backward(backward)


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
    steps are objects that are new each time.
    """

    recipe: nvfp4.Recipe
    group: Any = None
    step: Optional[Step] = None
    key: str = ""


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


@contextlib.contextmanager
@supports("enabled", "recipe", "amax_reduction_group")
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None, _graph: bool = False
):
    """Inside, modules compute in the formats of a recipe: one of this module's, an ``nvfp4.Recipe``
    or a preset's name.

    ``amax_reduction_group`` is the process group whose workers agree on amaxes. Delayed scaling
    moves on from one outermost region to the next. A region belongs to the thread, or the task of
    ``asyncio``, that enters it: a thread that is started inside enters its own.
    """
    step = region().step or Step()
    if not enabled:
        new = _HIGH_PRECISION._replace(step=step, key=_key(_HIGH_PRECISION.recipe))
    else:
        recipe = NVFP4BlockScaling() if recipe is None else recipe
        if isinstance(recipe, str):
            recipe = nvfp4.Recipe(recipe)
        elif not isinstance(recipe, nvfp4.Recipe):
            recipe = recipe.recipe()
        new = Region(recipe, amax_reduction_group, step, _key(recipe))
    with _inside(new):
        yield


@contextlib.contextmanager
def _inside(new: Region):
    token = _region.set(new)
    try:
        yield
    finally:
        _region.reset(token)


def checkpoint(function: Callable, *args, use_reentrant: bool = True, **kwargs):
    """``torch.utils.checkpoint.checkpoint`` for modules that follow ``autocast``: what is computed
    again is computed as it was the first time.

    With delayed scaling the backward pass has to come before the next outermost region, which moves
    the scales on.
    """
    for name, default in (("distribute_saved_activations", False), ("get_rng_state_tracker", None), ("tp_group", None)):
        refuse("checkpoint", name, kwargs.pop(name, default), default)
    here = region()

    def again(*args, **kwargs):
        with _inside(here):
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=use_reentrant, **kwargs)

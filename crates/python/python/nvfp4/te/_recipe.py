"""Recipes and ``autocast`` under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
import torch.utils.checkpoint

import nvfp4
from nvfp4.torch._delayed import update


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
    """TransformerEngine's recipe for training in NVFP4, with its switches. The environment is not read: see ``nvfp4.Recipe.from_env``."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    backward_override: Optional[str] = None

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


_keys = itertools.count()


@dataclass(frozen=True, eq=False)
class CustomRecipe:
    """A recipe from a factory: ``qfactory(role)`` gives the quantizer of a tensor.

    It may return an ``NVFP4Quantizer``, an ``IdentityQuantizer``, an ``nvfp4.Quantizer`` or the text of a spec. What it raises becomes a
    ValueError that names the role.
    """

    qfactory: Callable[[QuantizerRole], Any]
    backward_override: Optional[str] = None
    key: str = field(default_factory=lambda: f"custom recipe {next(_keys)}")

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

    It ends when one of its modules is used in another region: then everything that it saw is there, and nothing of it is computed again.
    """

    def __init__(self) -> None:
        # Each with the workers that agree on its amaxes.
        self.modules: Dict[int, Tuple[Any, Any]] = {}
        self.ended = False

    def end(self) -> None:
        """Moves the scales of its modules on, once."""
        if not self.ended:
            self.ended = True
            update(self.modules.values())


class Region(NamedTuple):
    """What modules follow inside ``autocast``."""

    recipe: nvfp4.Recipe
    group: Any = None
    step: Optional[Step] = None


_HIGH_PRECISION = Region(nvfp4.Recipe("high_precision"))
_region: contextvars.ContextVar[Region] = contextvars.ContextVar("nvfp4_te_region", default=_HIGH_PRECISION)


def region() -> Region:
    """What modules follow here."""
    return _region.get()


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None, calibrating: bool = False):
    """Inside, modules compute in the formats of a recipe: one of this module's, an ``nvfp4.Recipe`` or a preset's name.

    ``amax_reduction_group`` is the process group whose workers agree on amaxes. Calibration has nothing to do in these formats. Delayed scaling
    moves on from one outermost region to the next.
    """
    del calibrating
    step = region().step or Step()
    if not enabled:
        new = _HIGH_PRECISION._replace(step=step)
    else:
        recipe = NVFP4BlockScaling() if recipe is None else recipe
        if isinstance(recipe, str):
            recipe = nvfp4.Recipe(recipe)
        elif not isinstance(recipe, nvfp4.Recipe):
            recipe = recipe.recipe()
        new = Region(recipe, amax_reduction_group, step)
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
    """``torch.utils.checkpoint.checkpoint`` for modules that follow ``autocast``: what is computed again is computed as the first time.

    With delayed scaling the backward pass has to come before the next outermost region, which moves the scales on.
    """
    here = region()

    def again(*args, **kwargs):
        with _inside(here):
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=use_reentrant, **kwargs)

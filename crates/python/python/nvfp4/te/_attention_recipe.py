"""The recipe of attention where the environment names another one than that of linear layers:
TransformerEngine's ``NVTE_DPA_FP8_RECIPE`` and the variables beside it.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import nvfp4

from ._format import Format, fp8_dtype
from ._roles import DelayedScalingRequest, QuantizerRole

_NAMES = ("F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
_SLOTS = ("qkv", "s", "o", "do", "dp", "dqkv")


def _te() -> Any:
    import nvfp4.te  # whose recipes import this file

    return nvfp4.te


class Variables(NamedTuple):
    """What the environment says about attention."""

    recipe: str
    format: str
    algorithm: str
    history: int
    reduced: bool
    # Whether attention hands over its output, or this and its gradients.
    output: bool
    both: bool

    @classmethod
    def read(cls) -> Optional["Variables"]:
        """Those of now, if a recipe is named."""
        name = os.getenv("NVTE_DPA_FP8_RECIPE", "")
        return (
            cls(
                name,
                os.getenv("NVTE_DPA_FP8_FORMAT", "HYBRID"),
                os.getenv("NVTE_DPA_FP8DS_AMAX_ALGO", "most_recent"),
                int(os.getenv("NVTE_DPA_FP8DS_AMAX_HISTLEN", "1")),
                os.getenv("NVTE_DPA_FP8DS_REDUCE_AMAX", "1") == "1",
                os.getenv("NVTE_DPA_FP8_RECIPE_DPA", "0") == "1",
                os.getenv("NVTE_DPA_FP8_RECIPE_MHA", "0") == "1",
            )
            if name
            else None
        )

    def check(self) -> None:
        """Refuses values that name nothing."""
        for name, value, allowed in (
            ("NVTE_DPA_FP8_RECIPE", self.recipe, _NAMES),
            ("NVTE_DPA_FP8_FORMAT", self.format, ("HYBRID", "E4M3")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


class _Current(NamedTuple):
    """A factory for attention in current scaling, with scales of earlier steps for S and dP."""

    format: Format
    request: DelayedScalingRequest

    def __call__(self, role: QuantizerRole) -> Any:
        if role.tensor_type in ("s", "dp"):
            return self.request
        backward = role.tensor_type in ("do", "dqkv") or "dpa_grad_input" in role.name
        return _te().Float8CurrentScalingQuantizer(fp8_dtype(self.format, not backward), device=None)


def attention_of(recipe: Any) -> Any:
    """The recipe whose formats attention has: this one, if no variable named another when it was
    made; None in high precision.
    """
    given, te = recipe._attention, _te()
    if not recipe.fp8_dpa or (given is not None and given.recipe == "F16" and not recipe.custom()):
        return None
    if given is None or recipe.custom() or isinstance(recipe, getattr(te, given.recipe)):
        return recipe
    format = Format[given.format] if recipe.nvfp4() else recipe.fp8_format
    settings: Dict[str, Any] = {
        "fp8_format": format,
        "amax_history_len": given.history,
        "amax_compute_algo": given.algorithm,
        "reduce_amax": given.reduced,
    }
    flags: Dict[str, Any] = {"fp8_dpa": True, "backward_override": None}
    if given.recipe == "DelayedScaling":
        made = te.DelayedScaling(**settings, **flags)
    elif given.recipe == "MXFP8BlockScaling":
        made = te.MXFP8BlockScaling(fp8_format=format, **flags)
    else:
        if recipe.delayed():  # S and dP stay what they are
            settings = {name: getattr(recipe, name) for name in (*settings, "margin")}
        made = te.CustomRecipe(_Current(format, DelayedScalingRequest(**settings)), **flags)
    made._attention = None
    return made


def attention_specs(recipe: Any) -> Union[bool, Tuple[Tuple[str, str], ...]]:
    """Whether attention has the formats of a recipe, or those that it has instead, by slots."""
    of = attention_of(recipe)
    if of is None or of is recipe:
        return of is not None
    plan = nvfp4.Plan(of.recipe(), [("attention", "attention")])
    return tuple((slot, plan.quantizer("attention", slot).spec) for slot in _SLOTS)


def local_recipes(recipe: Any, quantizers: Sequence[Any]) -> List[Any]:
    """Recipes of the kinds that these quantizers of attention have."""
    te = _te()
    kinds = {
        te.MXFP8Quantizer: te.MXFP8BlockScaling,
        te.Float8CurrentScalingQuantizer: te.Float8CurrentScaling,
        te.Float8Quantizer: te.DelayedScaling,
    }
    found = dict.fromkeys(kinds[type(one)] for one in quantizers if type(one) in kinds)
    flags = {"fp8_dpa": recipe.fp8_dpa, "fp8_mha": recipe.fp8_mha, "backward_override": None}
    return [kind(**flags) for kind in found]

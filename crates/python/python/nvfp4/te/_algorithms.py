"""How delayed scaling makes scales where a recipe brings functions for it:
``amax_compute_algo(history)`` and ``scaling_factor_compute_algo(amax, scale, fp8_max, recipe)``.

Without functions the rule is that of a spec, ``nvfp4.Delayed``.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from nvfp4.torch._delayed import Scales, pass_of

from ._format import fp8_code


def scale_of(amax: Tensor, scale: Tensor, largest: float, margin: float) -> Tensor:
    """The scale that an amax asks for; one that is zero or not finite leaves it as it is."""
    new = (largest / amax) / 2**margin
    new = torch.where((amax > 0) & torch.isfinite(amax), new, scale)
    return torch.where(torch.isinf(new), torch.finfo(torch.float32).max, new)


def amax_and_scale_update(history: Tensor, scale: Tensor, largest: float, recipe: Any) -> None:
    """Moves a history on, [steps, tensors], and makes the scales that follow from it."""
    algorithm = recipe.amax_compute_algo
    if callable(algorithm):
        amax = algorithm(history)
    else:
        latest = algorithm == "most_recent"
        amax = history[0].clone() if latest else history.max(dim=0).values
    history.copy_(torch.roll(history, -1, 0))
    history[0].zero_()
    given = recipe.scaling_factor_compute_algo
    if given is None:
        scale.copy_(scale_of(amax, scale, largest, recipe.margin))
    else:
        scale.copy_(given(amax, scale, largest, recipe))


def _has_functions(recipe: Any) -> bool:
    algorithms = ("amax_compute_algo", "scaling_factor_compute_algo")
    return any(callable(getattr(recipe, name, None)) for name in algorithms)


def follow_algorithms(kept: Optional[Scales], recipe: Any) -> None:
    """From now on, scales that a module keeps follow from the functions of a recipe, if it has
    any.
    """
    if kept is None:
        return
    for name, scale in kept.named_children():
        scale.__dict__["rule"] = _rule(recipe, pass_of(name)) if _has_functions(recipe) else None


def _rule(recipe: Any, direction: str) -> Callable[[Tensor, Tensor], None]:
    largest = 448.0 if fp8_code(recipe.fp8_format, direction) == "e4m3" else 57344.0

    def update(history: Tensor, scale: Tensor) -> None:
        # As with the rule of a spec, a pass that saw nothing moves nothing.
        if history[0].item() != 0:
            amax_and_scale_update(history.unsqueeze(1), scale, largest, recipe)

    return update

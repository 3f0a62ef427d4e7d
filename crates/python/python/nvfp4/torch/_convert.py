"""Whole models."""

from __future__ import annotations

from typing import Callable, Optional, Union

import torch

import nvfp4

from ._formats import formats_of, plan_of
from ._linear import Linear


def convert_module(
    model: torch.nn.Module,
    recipe: Union[str, nvfp4.Recipe],
    *,
    filter: Optional[Callable[[str, torch.nn.Linear], bool]] = None,
    seed: int = 0,
) -> torch.nn.Module:
    """Swaps the linear layers of a model, in place, for layers in the formats that a recipe gives to their names.

    Parameters are shared, not copied, so optimizers and state dicts stay valid. ``filter(name, module)`` says which layers may be swapped.
    A layer that the recipe leaves in high precision stays as it is. The recipe is checked for the whole model before anything is changed.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and (filter is None or filter(name, module))
    }
    plan = plan_of(recipe, [(name or "model", "linear") for name in layers])
    swapped = {name: formats_of(plan, name or "model") for name in layers}
    for name, formats in swapped.items():
        if not formats.quantizes:
            continue
        new = Linear.of(layers[name], formats, name or "model", seed)
        if not name:
            return new
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model


def reduce_amaxes(model: torch.nn.Module, group=None) -> torch.nn.Module:
    """Makes all workers of a process group (of all processes, if none is given) agree on the amaxes of activations and gradients.

    Workers have other tokens of one batch. Each then quantizes with the scales that the whole batch would have had: amaxes of a tensor are
    reduced, and so are those of a feature over all tokens (the column direction of ``row-scaled``). Scales of a token, and of blocks as long as
    each worker has whole ones, come from one worker's tokens alone; they are not reduced. Delayed scaling is, in :func:`update_scales`.
    Works with gloo and NCCL.
    """
    group = torch.distributed.group.WORLD if group is None else group
    for module in model.modules():
        if hasattr(module, "amax_group"):
            module.amax_group = group
    return model

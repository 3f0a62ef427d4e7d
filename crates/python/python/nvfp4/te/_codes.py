"""Modules whose weights exist as codes, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Iterator, Optional

from torch import Tensor

import nvfp4
from nvfp4.torch import QuantizedTensor, quantize_parameters
from nvfp4.torch._layer import Layer
from nvfp4.torch._parameters import asking

from ._recipe import get_default_recipe
from .recipe import of as recipe_of


class _Begun:
    """What a weight was before it was quantized, on the CPU."""

    def __init__(self, value: Tensor):
        self.value: Optional[Tensor] = value.detach().cpu().clone()

    def get(self) -> Optional[Tensor]:
        """The values, or None if they were dropped."""
        return self.value

    def clear(self) -> None:
        """Drops the values."""
        self.value = None


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Inside it, new modules have their weights as codes alone, in the formats of a recipe; without
    one, in those of :func:`get_default_recipe`.

    An optimizer changes the decoded values, which are then quantized again. One with masters begins
    them from ``weight.get_high_precision_init_val()``, which is there with
    ``preserve_high_precision_init_val`` until ``weight.clear_high_precision_init_val()``. Weights
    have no scales of earlier steps, so recipes with delayed scaling are refused.
    """
    ours = recipe_of(get_default_recipe() if recipe is None else recipe)
    with asking(
        (lambda layer: _quantize(layer, ours, preserve_high_precision_init_val))
        if enabled
        else None
    ):
        yield


def _quantize(layer: Layer, recipe: nvfp4.Recipe, preserve: bool) -> None:
    begun = {name: _Begun(layer._parameters[name]) for name in layer.weights()} if preserve else {}  # type: ignore[arg-type]
    follows = hasattr(layer, "following")  # and is in high precision outside of all regions
    if follows:
        layer.use_recipe(recipe)
    quantize_parameters(layer)
    if follows:
        layer.use_recipe("high_precision")
    for name, values in begun.items():
        weight = layer._parameters[name]
        if isinstance(
            weight, QuantizedTensor
        ):  # what the recipe leaves in high precision has no such methods
            weight.__dict__.update(
                get_high_precision_init_val=values.get, clear_high_precision_init_val=values.clear
            )


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """The old name of :func:`quantized_model_init`."""
    warnings.warn(
        "fp8_model_init is deprecated: use quantized_model_init", DeprecationWarning, stacklevel=3
    )
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield

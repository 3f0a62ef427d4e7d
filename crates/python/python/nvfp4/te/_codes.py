"""Modules whose weights exist as codes, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

import nvfp4
from nvfp4.torch._layer import Layer
from nvfp4.torch._parameters import asking, put
from nvfp4.torch._quantized import check_spec

from ._float8 import Float8Quantizer
from ._hybrid import HybridQuantizer
from ._identity import IdentityQuantizer
from ._recipe import get_default_recipe
from ._states import RecipeState
from .recipe import of as recipe_of


# Whether new modules have codes as weights here, and whether they keep what these began with.
of_new_weights: contextvars.ContextVar[Tuple[bool, bool]] = contextvars.ContextVar(
    "nvfp4_te_new_weights", default=(False, False)
)


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
    ``preserve_high_precision_init_val`` until ``weight.clear_high_precision_init_val()``. With
    delayed scaling a weight is quantized with the scale that its module keeps, which begins at 1.
    """
    asked = get_default_recipe() if recipe is None else recipe
    ours = recipe_of(asked)
    token = of_new_weights.set((bool(enabled), bool(preserve_high_precision_init_val)))
    try:
        with asking(
            (lambda layer: _quantize(layer, asked, ours, preserve_high_precision_init_val))
            if enabled
            else None
        ):
            yield
    finally:
        of_new_weights.reset(token)


def _quantizers(layer: Any, asked: Any, number: int) -> List[Any]:
    """The quantizers of a layer's weights."""
    roles = layer.get_quantizer_roles(fwd=True, num_quantizers=3 * number)[1::3]
    device = next(layer.parameters()).device
    state = RecipeState.create(
        asked, mode="forward", num_quantizers=number, device=device, roles=roles
    )
    return state.make_quantizers()


def _quantize(layer: Layer, asked: Any, recipe: nvfp4.Recipe, preserve: bool) -> None:
    follows = hasattr(layer, "following")  # and is in high precision outside of all regions
    if follows:
        layer.use_recipe(recipe)
    weights = list(zip(layer.weights(), layer.products()))
    for (name, (prefix, _, formats)), quantizer in zip(
        weights, _quantizers(layer, asked, len(weights))
    ):
        weight = layer._parameters.get(name)
        # Both are tensors of their own kind in high precision too.
        kinds = (IdentityQuantizer, HybridQuantizer)
        plain = formats.weight.spec == "high-precision" and isinstance(quantizer, kinds)
        delayed = _delayed(quantizer)
        for side, part in delayed:
            _bind(part, _scale(layer, prefix, side))
        if weight is None or (formats.weight.spec == "high-precision" and not plain):
            continue
        try:
            if not plain:
                # A direction may stay in high precision: it is stored beside the codes.
                for spec in formats.weight.spec.removesuffix(" from row").split(" / "):
                    kept = delayed and nvfp4.Delayed.parts(spec)
                    if spec != "high-precision" and not kept:
                        check_spec(spec)
        except ValueError as error:
            raise ValueError(f"{layer.path}: {error}") from None
        with torch.no_grad():
            codes = quantizer.quantize(weight)
        begun = _Begun(weight) if preserve else None
        put(layer, name, codes)
        if delayed:  # a tensor has a quantizer of its own
            bind_codes(layer)
        if begun is not None:
            layer._parameters[name].__dict__.update(  # type: ignore[union-attr]
                get_high_precision_init_val=begun.get, clear_high_precision_init_val=begun.clear
            )
    if follows:
        layer.use_recipe("high_precision")


def _delayed(quantizer: Any) -> List[Tuple[str, Float8Quantizer]]:
    """What has delayed scaling of a quantizer, by how the name of its scale ends."""
    parts = [("", quantizer)]
    if isinstance(quantizer, HybridQuantizer):
        parts = [("_row", quantizer.rowwise_quantizer), ("_column", quantizer.columnwise_quantizer)]
    return [(side, part) for side, part in parts if isinstance(part, Float8Quantizer)]


def _scale(layer: Any, prefix: str, side: str) -> Any:
    """What a layer keeps for a weight, or for one of its directions."""
    return layer.delayed._modules[f"{prefix}weight{side}"]


def _bind(quantizer: Float8Quantizer, kept: Any) -> None:
    """Lets a quantizer read the scale and note amaxes where a layer keeps them."""
    quantizer.__dict__.update(scale=kept.scale, amax=kept.history[:1], _kept=kept)


def bind_codes(layer: Any) -> None:
    """Binds the quantizers of weights that are codes with delayed scaling to what their module
    keeps now.
    """
    for name, (prefix, _, formats) in zip(layer.weights(), layer._products):
        weight = layer._parameters.get(name)
        if not formats.weight.delayed:
            continue
        quantizer: Any = getattr(weight, "_quantizer", None)
        changed = False
        for side, part in _delayed(quantizer):
            kept, before = _scale(layer, prefix, side), part.__dict__.get("_kept")
            if before is not None and before.history.numel() != kept.history.numel():
                kept.scale.copy_(before.scale.to(kept.scale.device))
                changed = True
        if changed:
            quantizer = quantizer.copy()
            weight.update_quantizer(quantizer)  # which says so
        for side, part in _delayed(quantizer):
            _bind(part, _scale(layer, prefix, side))


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

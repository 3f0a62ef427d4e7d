"""TransformerEngine's names over this engine, for people who know them: on CPUs and on GPUs that
TransformerEngine's NVFP4 does not run on.

>>> import torch, nvfp4.te as te
>>> layer = te.Linear(64, 64, name="fc")
>>> with te.autocast(recipe=te.NVFP4BlockScaling()):
...     y = layer(torch.randn(32, 64))

Bytes are TransformerEngine's. What a quantizer stores is under its names: ``_rowwise_data``,
``_rowwise_scale_inv``, ``_amax_rowwise`` and their ``_columnwise`` twins.
"""

from . import recipe
from ._format import DType
from ._modules import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from ._quantizer import IdentityQuantizer, NVFP4Quantizer, NVFP4Tensor
from ._recipe import autocast, checkpoint, fp8_autocast, get_default_recipe
from ._roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from .recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

__all__ = [
    "CustomRecipe",
    "DType",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "GroupedLinear",
    "IdentityQuantizer",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QParams",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "get_default_recipe",
    "recipe",
]

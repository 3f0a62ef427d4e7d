"""TransformerEngine's names over this engine, for people who know them: on CPUs and on GPUs that
TransformerEngine's NVFP4 does not run on.

>>> import torch, nvfp4.te as te
>>> layer = te.Linear(64, 64, name="fc")
>>> with te.autocast(recipe=te.NVFP4BlockScaling()):
...     y = layer(torch.randn(32, 64))

Bytes are TransformerEngine's. What a quantizer stores is under its names: ``_rowwise_data``,
``_rowwise_scale_inv``, ``_amax_rowwise`` and their ``_columnwise`` twins.
"""

from . import custom_recipes, recipe
from ._codes import fp8_model_init, quantized_model_init
from ._format import DType
from ._graph import make_graphed_callables
from ._machine import (
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from ._modules import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from ._quantizer import IdentityQuantizer, NVFP4Quantizer, NVFP4Tensor, Quantizer
from ._quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer
from ._random import CudaRNGStatesTracker
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
    "CudaRNGStatesTracker",
    "CustomRecipe",
    "DType",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Format",
    "GroupedLinear",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QParams",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "autocast",
    "checkpoint",
    "custom_recipes",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "quantized_model_init",
    "recipe",
]

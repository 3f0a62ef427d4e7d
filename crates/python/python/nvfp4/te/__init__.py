"""TransformerEngine's names over this engine, for people who know them: on CPUs and on GPUs that
TransformerEngine's NVFP4 does not run on.

>>> import torch, nvfp4.te as te
>>> layer = te.Linear(64, 64, name="fc")
>>> with te.autocast(recipe=te.NVFP4BlockScaling()):
...     y = layer(torch.randn(32, 64))

Bytes are TransformerEngine's. What a quantizer stores is under its names: ``_rowwise_data``,
``_rowwise_scale_inv``, ``_amax_rowwise`` and their ``_columnwise`` twins.
"""

from ._linear import LayerNormLinear, Linear
from ._mlp import GroupedLinear, LayerNormMLP
from ._quantizer import IdentityQuantizer, NVFP4Quantizer, NVFP4Tensor
from ._recipe import CustomRecipe, NVFP4BlockScaling, QuantizerRole, autocast, checkpoint

__all__ = [
    "CustomRecipe",
    "GroupedLinear",
    "IdentityQuantizer",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QuantizerRole",
    "autocast",
    "checkpoint",
]

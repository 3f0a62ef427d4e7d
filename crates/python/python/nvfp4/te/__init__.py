"""TransformerEngine's names over this engine, for people who know them: on CPUs and on GPUs that
TransformerEngine's NVFP4 does not run on.

>>> import torch, nvfp4.te as te
>>> layer = te.Linear(64, 64, name="fc")
>>> with te.autocast(recipe=te.NVFP4BlockScaling()):
...     y = layer(torch.randn(32, 64))

Bytes are TransformerEngine's. What a quantizer stores is under its names: ``_rowwise_data``,
``_rowwise_scale_inv``, ``_amax_rowwise`` and their ``_columnwise`` twins.
"""

from ._attention import DotProductAttention
from ._experts import (
    Fp8Padding,
    Fp8Unpadding,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from ._inference import InferenceParams
from ._linear import LayerNormLinear, Linear
from ._mlp import GroupedLinear, LayerNormMLP
from ._multihead import MultiheadAttention
from ._norms import LayerNorm, RMSNorm
from ._quantizer import IdentityQuantizer, NVFP4Quantizer, NVFP4Tensor
from ._recipe import CustomRecipe, NVFP4BlockScaling, QuantizerRole, autocast, checkpoint
from ._rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from ._transformer import TransformerLayer

__all__ = [
    "CustomRecipe",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "IdentityQuantizer",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

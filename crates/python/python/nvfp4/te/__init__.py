"""TransformerEngine's names over this engine, for people who know them: on CPUs and on GPUs that
TransformerEngine's NVFP4 does not run on.

>>> import torch, nvfp4.te as te
>>> layer = te.Linear(64, 64, name="fc")
>>> with te.autocast(recipe=te.NVFP4BlockScaling()):
...     y = layer(torch.randn(32, 64))

Bytes are TransformerEngine's. What a quantizer stores is under its names: ``_rowwise_data``,
``_rowwise_scale_inv``, ``_amax_rowwise`` and their ``_columnwise`` twins.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import custom_recipes, ops, optimizers, recipe
from ._attention import DotProductAttention
from ._cross_entropy import parallel_cross_entropy
from ._codes import fp8_model_init, quantized_model_init
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
from ._rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from ._transformer import TransformerLayer
from ._format import DType
from ._glu import deinterleave_glu_tensor, interleave_glu_tensor
from ._graph import make_graphed_callables
from ._left_out import WHY as _WHY
from ._machine import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from ._float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from ._float8_block import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from ._hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from ._identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from ._mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from ._nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from ._quantizer import Quantizer
from ._storage import (
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from ._tensor import QuantizedTensor
from ._loading import register as _register
from ._random import CudaRNGStatesTracker
from ._recipe import autocast, checkpoint, fp8_autocast, get_default_recipe
from ._roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from .standin import install
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
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MultiheadAttention",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QParams",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "Recipe",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "custom_recipes",
    "deinterleave_glu_tensor",
    "fp8_autocast",
    "fp8_model_init",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "install",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "prepare_for_saving",
    "quantized_model_init",
    "recipe",
    "restore_from_func_ctx",
    "restore_from_saved",
]

_register()

if not _TYPE_CHECKING:  # to which every name would be there

    def __getattr__(name: str):
        why = f": {_WHY[name]}" if name in _WHY else "; docs/transformer-engine.md has TransformerEngine's names"
        raise AttributeError(f"nvfp4.te has no '{name}'{why}")

"""NVFP4 for torch: modules whose products are computed in the formats of a recipe.

>>> import torch, nvfp4.torch
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
>>> report = nvfp4.torch.convert_module(model, "nvfp4")  # in place
>>> report
<nvfp4: converted 2 layers (100 % of 16,576 parameters); left no matrix>
>>> model(torch.randn(32, 64)).sum().backward()

Modules hold their parameters in high precision and under the names of ``torch.nn``'s, so state
dicts load in both directions. They work under activation checkpointing,
``torch.compile(fullgraph=True)``, with one graph for every number of tokens, ``torch.export`` and
data parallelism (:func:`reduce_amaxes`). Stochastic rounding follows ``torch.manual_seed``.
"""

import torch as _torch

import nvfp4 as _nvfp4

from ._convert import convert_module, reduce_amaxes, stop_reducing_amaxes
from ._delayed import update_scales
from ._finite import check_finite
from ._grouped import GroupedLinear
from ._linear import Linear
from ._load import Loaded, load
from ._norm import LayerNormLinear, LayerNormMLP
from ._parameters import quantize_parameters, quantized_model_init, weights_changed
from ._quantized import QuantizedTensor
from ._report import Conversion
from ._sharding import Gathering, agree_on_weights, gather_codes
from ._torchao import from_torchao, quantize_torchao, to_torchao

__all__ = [
    "Conversion",
    "Gathering",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Loaded",
    "QuantizedTensor",
    "agree_on_weights",
    "check_finite",
    "convert_module",
    "from_torchao",
    "gather_codes",
    "load",
    "quantize_parameters",
    "quantize_torchao",
    "quantized_model_init",
    "reduce_amaxes",
    "stop_reducing_amaxes",
    "to_torchao",
    "update_scales",
    "weights_changed",
]

# Quantized tensors in files of ``torch.save`` load with ``weights_only=True``: their bytes are
# checked, and nothing in them is executed.
_torch.serialization.add_safe_globals([_nvfp4._restored, QuantizedTensor])

"""NVFP4 for torch: modules whose products are computed in the formats of a recipe.

>>> import torch, nvfp4.torch
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
>>> report = nvfp4.torch.convert_module(model, "nvfp4")  # in place
>>> report
<nvfp4: converted 2 layers (100 % of 16,576 parameters); left no matrix>
>>> model(torch.randn(32, 64)).sum().backward()

Modules hold their parameters in high precision and under the names of ``torch.nn``'s, so state
dicts load in both directions. They work under activation checkpointing,
``torch.compile(fullgraph=True)``, with one graph for every number of tokens, ``torch.export``, data
parallelism (:func:`reduce_amaxes`, :func:`gather_codes`) and tensor parallelism. Stochastic rounding follows ``torch.manual_seed``.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

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
from ._routes import Routes
from ._sharding import Gathering, agree_on_weights, gather_codes
from ._torchao import from_torchao, quantize_torchao, to_torchao

if _TYPE_CHECKING:
    from ._styles import ColwiseParallel, ColwiseRowwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "ColwiseRowwiseParallel",
    "Conversion",
    "Gathering",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Loaded",
    "QuantizedTensor",
    "Routes",
    "RowwiseParallel",
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


def __getattr__(name: str) -> _Any:
    # What they are made of takes seconds to import, and not every torch has it.
    if name in ("ColwiseParallel", "ColwiseRowwiseParallel", "RowwiseParallel"):
        from . import _styles

        return getattr(_styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

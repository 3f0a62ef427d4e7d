"""Which module of TransformerEngine is answered from where.

A name is looked for in the modules on the right, in their order, and then among the modules below.
Names that begin with an underscore are TransformerEngine's own affair: they are answered from this
folder alone.
"""

from __future__ import annotations

from typing import Dict, Tuple

ROOT, EXTENSION = "transformer_engine", "transformer_engine_torch"
# What is told by importlib.metadata, under each of these names.
VERSION = "2.20.0.dev0+nvfp4"
DISTRIBUTIONS = ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13")

_TE = ("nvfp4.te",)
_HERE = "nvfp4.te.standin."
_TENSORS = (_HERE + "_tensors", *_TE)
_PRODUCTS = (_HERE + "_products", *_TE)
_SETTINGS = (_HERE + "_quantization", *_TE)

# Below transformer_engine.pytorch.
_PYTORCH: Dict[str, Tuple[str, ...]] = {
    "_extra_state": (_HERE + "_extra_state",),
    "attention": _TE,
    "attention.dot_product_attention": _TE,
    "attention.dot_product_attention.dot_product_attention": _TE,
    "attention.dot_product_attention.utils": (_HERE + "_attention",),
    "attention.inference": _TE,
    "attention.multi_head_attention": _TE,
    "attention.rope": _TE,
    "constants": (_HERE + "_constants", *_TE),
    "cpp_extensions": (*_PRODUCTS, _HERE + "_extension"),
    "cpp_extensions.gemm": _PRODUCTS,
    "cross_entropy": _TE,
    "custom_recipes": ("nvfp4.te.custom_recipes",),
    "custom_recipes.gemm": ("nvfp4.te.custom_recipes.gemm",),
    "custom_recipes.quantizer_factories": ("nvfp4.te.custom_recipes.quantizer_factories",),
    "custom_recipes.quantizer_factory_zoo": ("nvfp4.te.custom_recipes.quantizer_factory_zoo",),
    "distributed": (_HERE + "_machine", *_TE),
    "float8_tensor": _TENSORS,
    "fp8": _SETTINGS,
    "graph": _TE,
    "module": (_HERE + "_modules", *_TE),
    "module._split_quantization": (_HERE + "_modules",),
    "module.base": (_HERE + "_modules", *_TE),
    "module.fp8_padding": _TE,
    "module.fp8_unpadding": _TE,
    "module.grouped_linear": (_HERE + "_modules", *_TE),
    "module.layernorm": _TE,
    "module.layernorm_linear": _TE,
    "module.layernorm_mlp": _TE,
    "module.linear": _TE,
    "module.rmsnorm": _TE,
    "ops": ("nvfp4.te.ops",),
    "optimizers": ("nvfp4.te.optimizers", _HERE + "_extension"),
    "optimizers.fused_adam": ("nvfp4.te.optimizers",),
    "optimizers.fused_sgd": ("nvfp4.te.optimizers",),
    "optimizers.multi_tensor_apply": ("nvfp4.te.optimizers",),
    "permutation": _TE,
    "quantization": _SETTINGS,
    "quantized_tensor": _TENSORS,
    "tensor": _TENSORS,
    "tensor.float8_blockwise_tensor": _TENSORS,
    "tensor.float8_tensor": _TENSORS,
    "tensor.grouped_tensor": _TENSORS,
    "tensor.hybrid_tensor": _TENSORS,
    "tensor.identity_tensor": _TENSORS,
    "tensor.mxfp8_tensor": _TENSORS,
    "tensor.nvfp4_tensor": _TENSORS,
    "tensor.storage": _TENSORS,
    "tensor.storage.float8_blockwise_tensor_storage": _TENSORS,
    "tensor.storage.float8_tensor_storage": _TENSORS,
    "tensor.storage.grouped_tensor_storage": _TENSORS,
    "tensor.storage.hybrid_tensor_storage": _TENSORS,
    "tensor.storage.identity_tensor_storage": _TENSORS,
    "tensor.storage.mxfp8_tensor_storage": _TENSORS,
    "tensor.storage.nvfp4_tensor_storage": _TENSORS,
    "tensor.utils": _TENSORS,
    "transformer": _TE,
    "utils": (_HERE + "_machine", *_TE),
}

TABLE: Dict[str, Tuple[str, ...]] = {
    ROOT: (),
    f"{ROOT}.common": (),
    f"{ROOT}.common.recipe": ("nvfp4.te.recipe",),
    f"{ROOT}.pytorch": _TE,
    **{f"{ROOT}.pytorch.{name}": sources for name, sources in _PYTORCH.items()},
    EXTENSION: (_HERE + "_extension",),
}

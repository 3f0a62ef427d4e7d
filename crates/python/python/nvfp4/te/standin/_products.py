"""``transformer_engine.pytorch.cpp_extensions``: products of quantized tensors."""

from .._products import general_gemm, general_grouped_gemm

"""``transformer_engine.pytorch.cpp_extensions``: products of quantized tensors."""

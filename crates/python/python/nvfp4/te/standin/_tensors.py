"""``transformer_engine.pytorch.tensor`` and ``.quantized_tensor``: what is asked about quantized
tensors, beside the classes.
"""

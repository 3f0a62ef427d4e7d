"""``transformer_engine.pytorch.module.base``: what all modules are."""

from .._modules import Follows as TransformerEngineBaseModule

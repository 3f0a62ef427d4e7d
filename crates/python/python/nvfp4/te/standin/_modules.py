"""``transformer_engine.pytorch.module.base``: what all modules are."""

from .._checks import validate_grouped_quantizer_list
from .._modules import Follows as TransformerEngineBaseModule


def is_module_grouped_tensor_path_supported(*args: object, **kwargs: object) -> bool:
    """Whether experts are computed from one tensor of all of them: each has its own here."""
    return False

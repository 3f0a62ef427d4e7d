"""NVFP4 checkpoints in Hugging Face ``transformers``: ``import nvfp4.transformers`` is all it takes.

Then ``from_pretrained`` loads NVFP4 checkpoints of ModelOpt's, compressed-tensors' and
:func:`nvfp4.convert`'s with the layers of ``nvfp4.torch``: codes in memory, products by the codes, on
a CPU or a GPU. Every other checkpoint goes the way that it went before.

    import nvfp4.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("Qwen3-8B-NVFP4")

:class:`Config` changes how one is loaded: ``quantization_config=Config(activations="none")``.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError:
    raise ImportError("nvfp4.transformers is for transformers 5: pip install 'nvfp4[transformers]'") from None

from ._config import Config
from ._quantizer import Quantizer, register

__all__ = ["Config", "Quantizer"]

register()

"""NVFP4 checkpoints in Hugging Face ``transformers``: ``import nvfp4.transformers`` is all it takes.

Then ``from_pretrained`` loads NVFP4 checkpoints of ModelOpt's, compressed-tensors' and
:func:`nvfp4.convert`'s with the layers of ``nvfp4.torch``: codes in memory, products by the codes, on
a CPU or a GPU. Every other checkpoint goes the way that it went before.

    import nvfp4.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("Qwen3-8B-NVFP4")

:class:`Config` changes how one is loaded: ``quantization_config=Config(activations="none")``.
"""

_NEEDS = "nvfp4.transformers needs transformers 5.21 or newer: pip install 'nvfp4[transformers]'"
try:
    import transformers as _transformers
except ImportError:
    raise ImportError(_NEEDS) from None
if tuple(map(int, _transformers.__version__.split(".")[:2])) < (5, 21):
    raise ImportError(f"{_NEEDS}; this is {_transformers.__version__}")

from ._config import Config
from ._quantizer import Quantizer, register

__all__ = ["Config", "Quantizer"]

register()

"""NVFP4 in Python: quantize, decode, multiply and store, exact to the bit.

Arrays are numpy's (with ``ml_dtypes`` for bfloat16), torch's, or those of any other library with
DLPack. Inputs are not copied, and the numpy arrays of a result are read-only views.

>>> import numpy, nvfp4
>>> x = numpy.linspace(-3, 3, 32 * 64, dtype=numpy.float32).reshape(32, 64)
>>> q = nvfp4.quantize(x)
>>> q
QuantTensor([32, 64] row: nvfp4)
>>> nvfp4.matmul(q, q).shape
(32, 32)

For torch modules see ``nvfp4.torch``, for TransformerEngine's names ``nvfp4.te``.
"""

from __future__ import annotations

from ._nvfp4 import (
    ConversionError,
    Delayed,
    Direction,
    Generator,
    Plan,
    QuantTensor,
    Quantizer,
    Recipe,
    Role,
    __version__,
    convert,
    layout,
    load,
    matmul,
    save,
    verify,
)

__all__ = [
    "ConversionError",
    "Delayed",
    "Direction",
    "Generator",
    "Plan",
    "QuantTensor",
    "Quantizer",
    "Recipe",
    "Role",
    "calibrate",
    "convert",
    "dequantize",
    "layout",
    "load",
    "matmul",
    "quantize",
    "save",
    "verify",
]


def quantize(
    x, *, seed=None, offset=None, generator=None, amax=None, column_amax=None, scale=None, column_scale=None, **settings
) -> QuantTensor:
    """Quantizes an array.

    ``settings`` are those of :class:`Quantizer`; without ``directions``, only the row direction is
    written.

    >>> import numpy, nvfp4
    >>> x = numpy.ones((4, 32), numpy.float32)
    >>> nvfp4.quantize(x, rounding="stochastic", seed=7, offset=0).codes.shape
    (4, 16)
    """
    quantizer = Quantizer(**settings)
    return quantizer.quantize(
        x, seed=seed, offset=offset, generator=generator, amax=amax, column_amax=column_amax, scale=scale,
        column_scale=column_scale,
    )  # fmt: skip


def dequantize(q: QuantTensor, dtype="float32", *, side: str = "row"):
    """The decoded values of a quantized tensor."""
    return q.dequantize(dtype, side=side)


def calibrate(model, batches, path=None, *, percentile: float = 99.9):
    """Runs batches through a model of torch and returns what goes through its layers: the statistics
    of the command ``nvfp4 calibrate``, under the names of the checkpoint.

    A batch is a tensor of tokens, or a dict or tuple of the model's arguments. Every
    ``torch.nn.Linear`` has ``input_amax``, ``input_percentile`` (what ``percentile`` percent of its
    blocks of 16 stay below) and ``input_mean_square`` of each column. Models of transformers have
    experts by themselves with ``expert_tokens``, and attention with ``k_scale`` and ``v_scale``.
    ``path`` names a file for ``nvfp4 convert --acts``. The model is evaluated, and nothing in it is
    changed.
    """
    from ._calibrate import calibrate

    return calibrate(model, batches, path, percentile=percentile)


def _restored(data: bytes, torch: bool) -> QuantTensor:
    """What pickles of a tensor call: the tensor of its bytes, with arrays of torch or numpy."""
    tensor = QuantTensor.from_bytes(data)
    return tensor.as_torch() if torch else tensor

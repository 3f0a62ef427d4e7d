"""Models whose weights exist as codes."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Callable, Iterator, Optional

import torch

from ._formats import Format
from ._gather import GathersCodes
from ._layer import Layer
from ._quantized import CodedWeight, QuantizedTensor


def quantize_parameters(
    model: torch.nn.Module,
    *,
    directions: str = "both",
    masters: Optional[torch.dtype] = None,
    requires_grad: Optional[bool] = None,
) -> torch.nn.Module:
    """Makes the weights of a model's quantized layers parameters that exist as codes, in place.

    The layers are those of :func:`convert_module`; products and their results stay what they were.
    With both ``directions`` a backward pass computes from codes as well; with "row" a weight takes
    half the memory, and gradients are in high precision. ``masters=torch.float32`` keeps what an
    optimizer changes beside the codes; without masters it changes the decoded values, which are
    then quantized again. ``requires_grad=False`` freezes the weights, for serving or for adapters
    beside them.

    >>> import torch, nvfp4.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    >>> report = nvfp4.torch.convert_module(model, "nvfp4")
    >>> model = nvfp4.torch.quantize_parameters(model, directions="row", requires_grad=False)
    >>> model[0].weight.nbytes
    2308
    """
    for module in model.modules():
        if isinstance(module, Layer):
            for name, (_, _, formats) in zip(module.weights(), module.products()):
                _quantize(module, name, formats.weight, directions, masters, requires_grad)
    return model


def _quantize(
    layer: Layer,
    name: str,
    format: Format,
    directions: str,
    masters: Optional[torch.dtype],
    requires_grad: Optional[bool],
) -> None:
    weight = layer._parameters.get(name)
    if weight is None or isinstance(weight, QuantizedTensor) or format.spec == "high-precision":
        return
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            f"{layer.path}: its weight is a DTensor, of which a worker has a part: call "
            "quantize_parameters before fully_shard; with tensor parallelism, gather_codes lets "
            "weights travel as codes"
        )
    master = None if masters is None else weight.detach().to(masters, copy=True)
    try:
        codes = QuantizedTensor.quantize(weight, format.spec, directions, master)
    except ValueError as error:
        raise ValueError(f"{layer.path}: {error}") from None
    put(layer, name, codes, requires_grad)


def put(layer: Layer, name: str, codes: torch.Tensor, requires_grad: Optional[bool] = None) -> None:
    """Puts codes in the place of a weight."""
    weight = layer._parameters[name]
    assert weight is not None, "it has one"
    asked = weight.requires_grad if requires_grad is None else requires_grad
    made = torch.nn.Parameter(codes, requires_grad=asked)
    # What others have noted on it, such as its place in a parallel model.
    for key, value in weight.__dict__.items():
        made.__dict__.setdefault(key, value)
    layer._parameters[name] = made


class _Here(threading.local):
    # What is done to a new layer.
    asked: Optional[Callable[[Layer], object]] = None


_here = _Here()


@contextlib.contextmanager
def asking(asked: Optional[Callable[[Layer], object]]) -> Iterator[None]:
    """Inside it, this is done to every new layer."""
    before, _here.asked = _here.asked, asked
    try:
        yield
    finally:
        _here.asked = before


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, *, directions: str = "both", masters: Optional[torch.dtype] = None
) -> Iterator[None]:
    """Inside it, new layers have their weights as codes from the beginning: a large model never lies
    in memory in high precision. Settings are those of :func:`quantize_parameters`.

    >>> import torch, nvfp4.torch
    >>> with nvfp4.torch.quantized_model_init(masters=torch.float32):
    ...     layer = nvfp4.torch.Linear(64, 64, dtype=torch.bfloat16)
    >>> layer.weight
    QuantizedTensor((64, 64), nvfp4(16x16), both, dtype=torch.bfloat16, device='cpu', master=torch.float32)
    """
    with asking(functools.partial(quantize_parameters, directions=directions, masters=masters) if enabled else None):
        yield


def as_asked(layer: Layer) -> None:
    """Quantizes the weights of a new layer, inside :func:`quantized_model_init`."""
    if _here.asked is not None:
        _here.asked(layer)


def weights_changed(model: torch.nn.Module) -> None:
    """Says that weights were written where torch does not count changes: through ``.data``, by a
    collective operation, or by another program. Their codes are made again at the next call.

    Steps of torch's optimizers, changes in place and state dicts that are loaded need no such call.
    For a model of :func:`gather_codes`, all workers call it.
    """
    for module in model.modules():
        if isinstance(module, Layer):
            module.forget_weights()
        for parameter in module._parameters.values():
            if isinstance(parameter, CodedWeight):
                parameter._prepared = None
            if isinstance(parameter, QuantizedTensor):
                parameter._seen = None
            shard = getattr(parameter, "_local_tensor", parameter)
            if isinstance(shard, GathersCodes):
                shard._agreed.end()

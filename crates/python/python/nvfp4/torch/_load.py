"""Quantized checkpoints into models of torch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

import nvfp4

from ._blocks import block_of, shapes
from ._convert import _walk
from ._layer import Layer
from ._linear import Linear, become
from ._quantized import QuantizedTensor

# What an amax is divided by for the scale of a tensor: 6 times 448.
_LARGEST = 2688.0


class Loaded(NamedTuple):
    """What :func:`load` did: the layers that have codes now, the other tensors that were copied, and
    what of the model the checkpoint does not have.
    """

    quantized: List[str]
    copied: List[str]
    missing: List[str]

    def __repr__(self) -> str:
        missing = f"; missing {', '.join(self.missing[:8])}" if self.missing else ""
        return f"<nvfp4: loaded codes of {len(self.quantized)} layers, copied {len(self.copied)} tensors{missing}>"


def load(folder: Union[str, Path], model: torch.nn.Module, *, activations: str = "file", strict: bool = True) -> Loaded:
    """Loads a checkpoint into a model, with the weights of its linear layers as codes.

    ``folder`` is a checkpoint of ModelOpt's or compressed-tensors' (of :func:`nvfp4.convert` too), or
    a file of :func:`nvfp4.save` with a tensor for each weight. Codes, scales and bits stay those of
    the file. A layer whose file has an activation scale quantizes its input by it (W4A4), unless
    ``activations`` is "none": then, and without one, weights alone are quantized. Codes are frozen;
    gradients pass through them in high precision. All other tensors are copied by their names.
    ``strict`` makes it an error if the checkpoint lacks a tensor of the model.
    """
    if activations not in ("file", "none"):
        raise ValueError(f"unknown activations '{activations}'; there are 'file', 'none'")
    tensors = _tensors(Path(folder))
    quantized: List[str] = []
    used: set = set()
    for part in _walk(model):
        module = part.module
        found = _codes_of(tensors, part.path) if isinstance(module, torch.nn.Linear) else None
        if found is None or not isinstance(module, torch.nn.Linear):
            continue
        names, make, amax = found
        used.update(names)
        put(module, part.path, make(), amax() if activations == "file" and amax is not None else None)
        quantized.append(part.path)
    state = model.state_dict()
    plain = {name: get for name, get in tensors.items() if name in state and name not in used}
    copied = {name: get() for name, get in plain.items()}
    meta = any(state[name].is_meta for name in copied)
    wrong = [name for name, tensor in copied.items() if isinstance(tensor, Tensor) and not tensor.is_floating_point()]
    if wrong:
        raise ValueError(f"{', '.join(wrong[:4])}: codes without their scales, or of a layer that is no torch.nn.Linear of the model")
    if meta:  # parameters on the meta device cannot be copied to, so all become those of the file
        copied = {name: _beside(state[name], tensor) for name, tensor in copied.items()}
    result = model.load_state_dict(copied, strict=False, assign=meta)
    weights = {f"{path}.weight" for path in quantized}
    amaxes = {f"{path}.input_amax" for path in quantized}
    missing = [name for name in result.missing_keys if name not in weights and name not in amaxes]
    if not quantized:
        raise ValueError(f"{folder}: no codes for any torch.nn.Linear of the model; are the names of its layers those of the file?")
    if missing and strict:
        raise ValueError(f"{folder} lacks {', '.join(missing[:8])}{' and more' if len(missing) > 8 else ''}; strict=False leaves them as they are")
    return Loaded(quantized, sorted(copied), missing)


_Get = Callable[[], Any]


def _tensors(folder: Path) -> Dict[str, _Get]:
    """The tensors of a checkpoint by their names, each read when it is asked for."""
    if folder.is_file():
        ours = nvfp4.load(folder)
        return {name: functools.partial(ours.__getitem__, name) for name in ours}
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError("nvfp4.torch.load reads checkpoints with safetensors: pip install safetensors") from None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in _indexed(index)})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected *.safetensors, found none")
    tensors: Dict[str, _Get] = {}
    for file in files:
        opened = safe_open(str(file), framework="pt")
        for name in opened.keys():
            tensors[name] = functools.partial(opened.get_tensor, name)
    return tensors


def _indexed(index: Path) -> List[str]:
    """The files that an index names."""
    try:
        names = [str(name) for name in json.loads(index.read_text())["weight_map"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: expected JSON with a weight_map of tensors and files ({error!r})") from None
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: expected names of files in its folder, got {name!r}")
    return names


def _beside(parameter: Tensor, tensor: Any) -> Any:
    """A tensor of a file in the type and on the device of a parameter, in memory if that has none."""
    device = None if parameter.is_meta else parameter.device
    return tensor.to(device=device, dtype=parameter.dtype) if isinstance(tensor, Tensor) else tensor


_Found = Tuple[List[str], Callable[[], QuantizedTensor], Optional[Callable[[], Tensor]]]


def _codes_of(tensors: Dict[str, _Get], path: str) -> Optional[_Found]:
    """The codes of a layer: the names of their tensors, what makes them, and what gives the amax of
    its input, if the file has one.
    """
    prefix = f"{path}." if path else ""

    def named(*names: str) -> List[str]:
        return [prefix + name for name in names]

    for codes, scale, spec, given in (
        ("weight_packed", "weight_global_scale", "nvfp4(llm-compressor)", "input_global_scale"),
        ("weight", "weight_scale_2", "nvfp4(modelopt)", "input_scale"),
    ):
        names = named(codes, "weight_scale", scale)
        if all(name in tensors for name in names):
            static = prefix + given if prefix + given in tensors else None

            def make(names=names, spec=spec) -> QuantizedTensor:
                return codes_of_parts(names[0], spec, *(tensors[name]() for name in names))

            def amax(static=static, spec=spec) -> Tensor:
                return amax_of(str(static), spec, tensors[static]())  # type: ignore[index]

            return names + ([static] if static else []), make, amax if static else None
    name = prefix + "weight"
    if name in tensors and isinstance(tensors[name](), nvfp4.QuantTensor):
        return [name], lambda: _of_ours(name, tensors[name]()), None
    return None


def amax_of(name: str, spec: str, scale: Tensor) -> Tensor:
    """The amax that the scale of an input stands for: ModelOpt multiplies by it, compressed-tensors
    divides.
    """
    numbers = scale.float()
    found = (numbers * _LARGEST if spec == "nvfp4(modelopt)" else _LARGEST / numbers).reshape(-1).amax().reshape(1)
    if not 0 < found.item() < float("inf"):
        raise ValueError(f'{name}: expected a positive number; activations="none" does without')
    return found


def codes_of_parts(name: str, spec: str, codes: Tensor, scales: Tensor, stored: Tensor) -> QuantizedTensor:
    if codes.dtype is not torch.uint8 or codes.dim() != 2:
        raise ValueError(f"{name}: expected a matrix of codes of uint8, got {tuple(codes.shape)} of {codes.dtype}")
    rows, packed = codes.shape
    matrix = (rows, 2 * packed)
    blocks = shapes(spec, "row", matrix)[1][1]
    if scales.dtype not in (torch.uint8, torch.float8_e4m3fn) or tuple(scales.shape) != blocks:
        raise ValueError(f"{name}: expected scales {blocks} of E4M3, got {tuple(scales.shape)} of {scales.dtype}")
    if stored.numel() != 1 or stored.isnan().any():
        raise ValueError(f"{name}: expected one scale of the tensor, got {stored}")
    parts = [codes.contiguous(), scales.contiguous().view(torch.uint8), stored.float().reshape(1)]
    return QuantizedTensor(block_of(parts), None, spec, matrix, torch.get_default_dtype())


def _of_ours(name: str, tensor: nvfp4.QuantTensor) -> QuantizedTensor:
    row = tensor.as_torch().row
    if row is None or len(tensor.shape) != 2:
        raise ValueError(f"{name}: expected the row direction of a matrix")
    parts = row._parts()
    specs = {"amax": row.format, "multiplier": "nvfp4(modelopt)", "divisor": "nvfp4(llm-compressor)"}
    spec = specs[row.unit] if row.format.startswith("nvfp4") else row.format
    made = QuantizedTensor(block_of(parts), None, spec, tuple(tensor.shape), torch.float32)  # type: ignore[arg-type]
    expected = tensor.as_torch().dequantize("float32")
    if not torch.equal(made.dequantize(), expected):
        raise ValueError(f"{name}: {row.format} cannot be a parameter; quantize the weight again in the format that the recipe names")
    return made


def put(module: torch.nn.Linear, path: str, codes: QuantizedTensor, amax: Optional[Tensor]) -> None:
    """Gives a layer its codes, in the type and on the device of its weight."""
    weight = module.weight
    if tuple(weight.shape) != codes.matrix:
        raise ValueError(f"{path}: the model's weight is {tuple(weight.shape)}, the checkpoint's {codes.matrix}")
    device = codes.device if weight.is_meta else weight.device
    there = codes.to(device=device, dtype=weight.dtype)
    module._parameters["weight"] = torch.nn.Parameter(there, requires_grad=False)
    if amax is None:
        module._buffers.pop("input_amax", None)  # of a file before
        if isinstance(module, Layer):
            module.use_recipe(recipe_of("high-precision"))
        return
    if not isinstance(module, Layer):
        become(module, Linear, path, 0)
    module.use_recipe(recipe_of("nvfp4"))  # type: ignore[operator]
    module.register_buffer("input_amax", amax.to(device))


def recipe_of(input: str) -> nvfp4.Recipe:
    """A layer with the weights of a file, and gradients in high precision."""
    column = "" if input == "high-precision" else " / high-precision"
    formats = {"input": input + column, "weight": "nvfp4 / high-precision", "grad_output": "high-precision"}
    return nvfp4.Recipe.from_function(f"loaded:{input}", lambda role: formats[role.slot])

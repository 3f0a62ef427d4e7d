"""Quantized checkpoints into models of torch."""

from __future__ import annotations

import functools
import json
import warnings
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
from ._stored import decoded, matrix_of

# What an amax is divided by for the scale of a tensor: 6 times 448.
_LARGEST = 2688.0


class Loaded(NamedTuple):
    """What :func:`load` did: the layers that have codes now, the other tensors that were copied, what
    of the model the checkpoint does not have, and the layers of FP8 whose weights were decoded.
    """

    quantized: List[str]
    copied: List[str]
    missing: List[str]
    decoded: List[str]

    def __repr__(self) -> str:
        decoded = f", decoded {len(self.decoded)} of FP8" if self.decoded else ""
        missing = f"; missing {', '.join(self.missing[:8])}" if self.missing else ""
        return f"<nvfp4: loaded codes of {len(self.quantized)} layers{decoded}, copied {len(self.copied)} tensors{missing}>"


def load(folder: Union[str, Path], model: torch.nn.Module, *, activations: str = "file", strict: bool = True) -> Loaded:
    """Loads a checkpoint into a model, with the weights of its linear layers as codes.

    ``folder`` is a checkpoint of ModelOpt's or compressed-tensors' (of :func:`nvfp4.convert` too), or
    a file of :func:`nvfp4.save` with a tensor for each weight. Codes, scales and bits stay those of
    the file. A layer whose file has an activation scale quantizes its input by it (W4A4), unless
    ``activations`` is "none": then, and without one, weights alone are quantized. Codes are frozen;
    gradients pass through them in high precision. Weights in FP8 or MXFP8 are decoded, with a
    warning; what is quantized in another way is refused. All other tensors are copied by their names.
    ``strict`` makes it an error if the checkpoint lacks a tensor of the model.
    """
    if activations not in ("file", "none"):
        raise ValueError(f"unknown activations '{activations}'; there are 'file', 'none'")
    tensors = _tensors(Path(folder))
    modules: Dict[str, Dict[str, _Entry]] = {}
    for name, entry in tensors.items():
        path, _, last = name.rpartition(".")
        modules.setdefault(path, {})[last] = entry
    state = model.state_dict()
    quantized: List[str] = []
    values: Dict[str, Tensor] = {}
    used: set = set()
    for part in _walk(model):
        path, module, of = part.path, part.module, modules.get(part.path, {})
        stored = matrix_of(path, {last: entry.what for last, entry in of.items() if entry.what}) if _named(path, "weight") in state else None
        ours: Any = of["weight"].get() if "weight" in of and of["weight"].what is None else None
        if stored is None and not isinstance(ours, nvfp4.QuantTensor):
            continue
        if not isinstance(module, torch.nn.Linear):
            raise ValueError(f"{path}: expected a torch.nn.Linear for these codes, got {type(module).__name__}")
        used.update(_named(path, last) for last in (stored.parts if stored is not None else ["weight"]))
        if stored is None:
            put(module, path, _of_ours(_named(path, "weight"), ours), None)
        elif stored.form is None:
            scale = "weight_scale_inv" if "weight_scale_inv" in stored.parts else "weight_scale"
            values[_named(path, "weight")] = decoded(path, of["weight"].get(), of[scale].get())
            continue
        else:
            form = stored.form
            codes = codes_of_parts(_named(path, form.codes), form.spec, *(of[last].get() for last in form[1:4]))
            given = form.input in stored.parts and activations == "file"
            put(module, path, codes, amax_of(_named(path, form.input), form.spec, of[form.input].get()) if given else None)
        quantized.append(path)
    copied = {name: entry.get() for name, entry in tensors.items() if name in state and name not in used}
    wrong = [name for name, tensor in copied.items() if _is_plain(state[name]) and not _is_plain(tensor)]
    if wrong:
        raise ValueError(f"{', '.join(wrong[:4])}: codes without their scales, or of a layer that is no torch.nn.Linear of the model")
    eight = sorted(name.removesuffix("weight").removesuffix(".") for name in values)
    if not quantized and not eight:
        raise ValueError(f"{folder}: no codes for any torch.nn.Linear of the model; are the names of its layers those of the file?")
    if eight:
        warnings.warn(f"{len(eight)} layers of FP8 ({', '.join(eight[:4])}) are decoded: they multiply in high precision", stacklevel=2)
    copied.update(values)
    if any(state[name].is_meta for name in copied):  # parameters on the meta device cannot be copied to, so all become those of the file
        copied = {name: _beside(state[name], tensor) for name, tensor in copied.items()}
        result = model.load_state_dict(copied, strict=False, assign=True)
    else:
        result = model.load_state_dict(copied, strict=False)
    of_codes = {_named(path, last) for path in quantized for last in ("weight", "input_amax")}
    missing = [name for name in result.missing_keys if name not in of_codes]
    if missing and strict:
        raise ValueError(f"{folder} lacks {', '.join(missing[:8])}{' and more' if len(missing) > 8 else ''}; strict=False leaves them as they are")
    return Loaded(quantized, sorted(copied), missing, eight)


class _Entry(NamedTuple):
    """A tensor of a checkpoint: how to read it, and its type and shape, which a file of ours does not
    say beforehand.
    """

    get: Callable[[], Any]
    what: Optional[Tuple[str, Tuple[int, ...]]]


def _named(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last


def _is_plain(tensor: Any) -> bool:
    """Whether these are numbers in high precision: FP8 without its scales is not."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.element_size() > 1


def _tensors(folder: Path) -> Dict[str, _Entry]:
    """The tensors of a checkpoint by their names, each read when it is asked for."""
    if folder.is_file():
        ours = nvfp4.load(folder)
        return {name: _Entry(functools.partial(ours.__getitem__, name), None) for name in ours}
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
    tensors: Dict[str, _Entry] = {}
    for file in files:
        opened = safe_open(str(file), framework="pt")
        for name in opened.keys():
            part = opened.get_slice(name)
            tensors[name] = _Entry(functools.partial(opened.get_tensor, name), (part.get_dtype(), tuple(part.get_shape())))
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

"""What the files of a checkpoint hold, by module: NVFP4, FP8, or neither."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch

DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
# Scales of keys and values, which transformers has no cache for.
CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")


class Form(NamedTuple):
    """The names in which a library stores the codes of a matrix: codes, their scales, the scale of
    the tensor, and that of its input.
    """

    spec: str
    codes: str
    scales: str
    tensor: str
    input: str


MODELOPT = Form("nvfp4(modelopt)", "weight", "weight_scale", "weight_scale_2", "input_scale")
COMPRESSED = Form("nvfp4(llm-compressor)", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
# ModelOpt's experts in one tensor, inputs before outputs; names follow that of the matrix.
JOINED = Form("nvfp4(modelopt)", "", "_weight_scale", "_weight_scale_2", "_input_scale")


class Stored(NamedTuple):
    """The tensors of one matrix, by the last parts of their names. ``form`` is None for FP8."""

    form: Optional[Form]
    parts: Dict[str, Tuple[torch.dtype, Tuple[int, ...]]]


class Files(NamedTuple):
    """The quantized matrices of a checkpoint by their modules, experts in one tensor by the name of
    that tensor, and the names of all tensors.
    """

    matrices: Dict[str, Stored]
    joined: Dict[str, Stored]
    names: List[str]


def read(files: Optional[Iterable[Any]]) -> Files:
    """Reads the headers of a checkpoint's files."""
    from safetensors import safe_open

    found: Dict[str, Tuple[str, Tuple[int, ...]]] = {}
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: NVFP4 is read from *.safetensors")
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    if not found:
        raise ValueError("NVFP4 is read from the *.safetensors of a folder: give from_pretrained its name")
    modules: Dict[str, Dict[str, Tuple[str, Tuple[int, ...]]]] = {}
    for name, what in found.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = what
    matrices: Dict[str, Stored] = {}
    joined: Dict[str, Stored] = {}
    for module, tensors in modules.items():
        stored = _matrix(module, tensors)
        if stored is not None:
            matrices[module] = stored
        for last in tensors:
            if last.endswith(JOINED.tensor) and last != MODELOPT.tensor:
                name = last[: -len(JOINED.tensor)]
                parts = [name + suffix for suffix in JOINED[1:]]
                joined[f"{module}.{name}"] = Stored(JOINED, _parts(module, tensors, parts, parts[:3]))
    return Files(matrices, joined, list(found))


def _matrix(module: str, tensors: Dict[str, Tuple[str, Tuple[int, ...]]]) -> Optional[Stored]:
    """What the tensors of a module are, if they are quantized."""
    form: Optional[Form]
    for form in (MODELOPT, COMPRESSED):
        if form.tensor in tensors:
            names, needed = list(form[1:]), list(form[1:4])
            break
    else:
        form = None
        dtype = tensors["weight"][0] if "weight" in tensors else ""
        if not dtype.startswith("F8"):
            wrong = [name for name in ("weight_packed", "weight_scale", "pre_quant_scale") if name in tensors]
            if wrong or dtype == "U8":
                raise ValueError(f"{module}: {', '.join(wrong or ['weight'])} is neither of NVFP4 nor of FP8, which are read")
            return None
        scale = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        names, needed = ["weight", scale, "input_scale"], ["weight", scale]
    unknown = [name for name in tensors if name not in (*names, "bias", *CACHE)]
    if unknown:
        raise ValueError(f"{module}: {', '.join(unknown)} beside its codes is not known, so its products would be wrong")
    return Stored(form, _parts(module, tensors, names, needed))


def _parts(module: str, tensors: Dict[str, Tuple[str, Tuple[int, ...]]], names: List[str], needed: List[str]):
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ValueError(f"{module}: the checkpoint lacks {', '.join(missing)}")
    parts = {}
    for name in names:
        if name in tensors:
            dtype, shape = tensors[name]
            if dtype not in DTYPES:
                raise ValueError(f"{module}.{name}: {dtype} is not known here")
            parts[name] = DTYPES[dtype], shape
    return parts

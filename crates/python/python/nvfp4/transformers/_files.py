"""What the files of a checkpoint hold, by module: NVFP4, FP8, or neither."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from ..torch._stored import MODELOPT, Form, Stored, matrix_of, parts_of_module

# ModelOpt's experts in one tensor, inputs before outputs; names follow that of the matrix.
JOINED = Form("nvfp4(modelopt)", "", "_weight_scale", "_weight_scale_2", "_input_scale")


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
        stored = matrix_of(module, tensors)
        if stored is not None:
            matrices[module] = stored
        for last in tensors:
            if last.endswith(JOINED.tensor) and last != MODELOPT.tensor:
                name = last[: -len(JOINED.tensor)]
                parts = [name + suffix for suffix in JOINED[1:]]
                joined[f"{module}.{name}"] = Stored(JOINED, parts_of_module(module, tensors, parts, parts[:3]))
    return Files(matrices, joined, list(found))

"""How the libraries that write checkpoints store the matrix of a linear layer: NVFP4, FP8 or MXFP8."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
# Scales of keys and values, which transformers has no cache for.
CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")

_SIDE_OF_BLOCK = 128
_BLOCK_OF_MX = 32


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


class Stored(NamedTuple):
    """The tensors of one matrix, by the last parts of their names. ``form`` is None for FP8."""

    form: Optional[Form]
    parts: Dict[str, Tuple[torch.dtype, Tuple[int, ...]]]


def matrix_of(module: str, tensors: Dict[str, Tuple[str, Tuple[int, ...]]]) -> Optional[Stored]:
    """What the tensors of a module are, given their types and shapes by the last parts of their names;
    None if they are not quantized. What products could not take into account is refused.
    """
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
    return Stored(form, parts_of_module(module, tensors, names, needed))


def parts_of_module(module: str, tensors: Dict[str, Tuple[str, Tuple[int, ...]]], names: List[str], needed: List[str]):
    """The types and shapes of these tensors of a module, of which some may be absent."""
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


def decoded(path: str, codes: Tensor, scale: Tensor) -> Tensor:
    """The values of an FP8 weight, ``fl(value · scale)``: with one scale, one for each row, for each
    block of 128 × 128, or (MXFP8, whose scales are bytes) for each 32 of a row.
    """
    rows, cols = codes.shape
    tall, wide = _tile(rows, cols, scale)
    if not tall:
        raise ValueError(f"{path}: FP8 of {rows} × {cols} with scales of {tuple(scale.shape)} in {scale.dtype} is not known")
    if scale.dtype is torch.uint8:
        scale = torch.ldexp(torch.ones(scale.shape), scale.int().cpu() - 127).to(codes.device)
    scale = scale.float().reshape(-(-rows // tall), -(-cols // wide))
    whole = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]
    return codes.float() * whole


def _tile(rows: int, cols: int, scale: Tensor) -> Tuple[int, int]:
    """Rows and columns that share a scale, by its type and shape as the converter tells them apart;
    (0, 0) if they are none of these.
    """
    shape = tuple(scale.shape)
    tall, wide = -(-rows // _SIDE_OF_BLOCK), -(-cols // _SIDE_OF_BLOCK)
    if scale.dtype is torch.uint8:
        return (1, _BLOCK_OF_MX) if shape == (rows, -(-cols // _BLOCK_OF_MX)) else (0, 0)
    if scale.numel() == 1:
        return rows, cols
    if shape in ((rows,), (rows, 1)):
        return 1, cols
    return (_SIDE_OF_BLOCK, _SIDE_OF_BLOCK) if shape in ((tall, wide), (tall, 1, wide, 1)) else (0, 0)

"""What a machine can do, under TransformerEngine's names."""

from __future__ import annotations

from typing import Any, Tuple, Union

import torch

# Where modules are made that no device is named for; torch's default device if it is None.
_default: Any = None


def stand_in() -> None:
    """Makes modules on GPUs where there are any, as programs for TransformerEngine expect."""
    global _default
    _default = "cuda"


def place(device: Any) -> Any:
    """The device that modules are made on; None is torch's default device."""
    return _default if device is None and _default and torch.cuda.is_available() else device


def get_device_compute_capability() -> Tuple[int, int]:
    """The compute capability of the current GPU; (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version() -> Tuple[int, int, int]:
    """cuDNN's version as torch sees it, in three numbers; zeros where there is none."""
    packed = torch.backends.cudnn.version() or 0 if torch.cuda.is_available() else 0
    base = 10_000 if packed >= 90_000 else 1_000
    return packed // base, packed % base // 100, packed % 100


def _answer(return_reason: bool) -> Union[bool, Tuple[bool, str]]:
    """Whether formats are computed here: on every CPU, and on GPUs from Ampere on."""
    available = not torch.cuda.is_available() or get_device_compute_capability() >= (8, 0)
    if not return_reason:
        return available
    return available, (
        ""
        if available
        else "a GPU of compute capability 8.0 or higher is needed; the CPU computes it too"
    )


def is_fp8_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether FP8 with scales per tensor is computed here, and if asked for, why not."""
    return _answer(return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether MXFP8 is computed here, and if asked for, why not."""
    return _answer(return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether FP8 in blocks is computed here, and if asked for, why not."""
    return _answer(return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether NVFP4 is computed here, and if asked for, why not."""
    return _answer(return_reason)


def is_bf16_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether bfloat16 is computed here, and if asked for, why not."""
    return _answer(return_reason)

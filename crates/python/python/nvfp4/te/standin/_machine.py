"""``transformer_engine.pytorch.utils`` and ``.distributed``: what programs ask about a machine and
about numbers.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple, Union

import torch

from .._machine import is_bf16_available


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether products of FP8 take their operands in any order: they do everywhere here."""
    return True


def is_bf16_compatible() -> bool:
    """Whether bfloat16 is computed here."""
    return bool(is_bf16_available())


def get_sm_count() -> int:
    """The multiprocessors of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def ceil_div(numerator: int, denominator: int) -> int:
    """A quotient, rounded up."""
    return -(-numerator // denominator)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The first multiple that is not smaller."""
    return ceil_div(value, multiple) * multiple


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuses numbers of which one does not divide the other."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient of numbers of which one divides the other."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def cast_if_needed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in this type."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def canonicalize_device(device: Union[torch.device, str, None]) -> torch.device:
    """A device with its index."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def canonicalize_dtype(dtype: Optional[torch.dtype]) -> torch.dtype:
    """A type, or torch's default one."""
    return torch.get_default_dtype() if dtype is None else dtype


def devices_match(device1: torch.device, device2: torch.device) -> bool:
    """Whether two devices are the same one."""
    return canonicalize_device(device1) == canonicalize_device(device2)


def get_default_init_method() -> Callable:
    """The initial values of a weight where nothing else is said."""
    return init_method_normal(0.023)


def init_method_normal(sigma: float) -> Callable:
    """Normal numbers with this deviation."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable:
    """Normal numbers whose deviation is made smaller for deep models."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_distributed_world_size(group: Any = None) -> int:
    """The number of workers of a group."""
    return torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """The number of this worker in a group."""
    return torch.distributed.get_rank(group) if torch.distributed.is_initialized() else 0

"""``transformer_engine.pytorch.quantization``: what programs ask about the region around them."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .. import _machine
from .._algorithms import amax_and_scale_update as _amax_and_scale_update  # noqa: F401
from .._algorithms import scale_of
from .._format import DType, Format
from .._recipe import get_default_recipe, region
from .._states import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    RecipeState,
    fp8_dtype,
)

get_default_fp8_recipe = get_default_recipe


def check_fp8_support() -> Tuple[bool, str]:
    """Whether FP8 is computed here, and why not."""
    return _machine.is_fp8_available(return_reason=True)  # type: ignore[return-value]


check_mxfp8_support = check_nvfp4_support = check_fp8_block_scaling_support = check_fp8_support


def get_align_size_for_quantization(recipe: Any) -> int:
    """The multiple that rows of groups are padded to."""
    if recipe.custom():
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def _format(recipe: Any, forward: bool) -> Format:
    hybrid = Format.E4M3 if forward else Format.E5M2
    return hybrid if recipe.fp8_format is Format.HYBRID else recipe.fp8_format


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """The FP8 type of a pass, as torch names it."""
    forward = _format(fp8_recipe, fprop_tensor) is Format.E4M3
    return torch.float8_e4m3fn if forward else torch.float8_e5m2


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """The FP8 type of a pass, as quantizers name it."""
    return fp8_dtype(fp8_recipe, fprop_tensor)


def get_fp4_te_dtype(fp4_recipe: Any) -> DType:
    """The FP4 type, as quantizers name it."""
    if fp4_recipe.fp4_format is not Format.E2M1:
        raise ValueError(f"fp4_format: expected Format.E2M1, got {fp4_recipe.fp4_format}")
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> float:
    """The largest FP8 number of a pass."""
    return _format(fp8_recipe, fprop_tensor).value.max_fwd


def _default_sf_compute(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, margin: int, _fp32_max: float = 0.0
) -> torch.Tensor:
    return scale.copy_(scale_of(amax, scale, fp8_max, margin))


class FP8GlobalStateManager:
    """The region around a call, as programs ask for it. There is no other state: a region belongs
    to its thread.
    """

    @classmethod
    def reset(cls) -> None:
        """Does nothing: what is set by a region ends with it."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules compute in a recipe here."""
        return region().asked is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether modules watch without quantizing: they never do."""
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """The recipe of this region, or the default one."""
        asked = region().asked
        return get_default_recipe() if asked is None else asked

    @classmethod
    def get_fp8_group(cls) -> Optional[Any]:
        """The workers that agree on amaxes."""
        return region().group

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key of a pass in ``fp8_meta``."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """The name of a pass."""
        return "forward" if forward else "backward"

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_fp8_support)
    is_nvfp4_available = staticmethod(check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_support)

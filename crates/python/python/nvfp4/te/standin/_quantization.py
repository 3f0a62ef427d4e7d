"""``transformer_engine.pytorch.quantization``: what programs ask about the region around them."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .. import _machine
from .._algorithms import amax_and_scale_update as _amax_and_scale_update  # noqa: F401
from .._algorithms import scale_of
from .._codes import of_new_weights
from .._format import DType, Format
from .._recipe import Region, get_default_recipe, region, set_region
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
    return fp8_dtype(fp8_recipe.fp8_format, fprop_tensor)


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


# What modules and regions do by themselves here, with no state that all of them share.
_SCALES = "modules keep the scales of delayed scaling themselves, and the end of a region moves them on"
_LEFT_OUT = {
    **dict.fromkeys(
        (
            "add_fp8_tensors_to_global_buffer", "reduce_and_update_fp8_tensors",
            "reduce_tensor_across_group_op_max", "get_buffer_info", "get_key_in_buffer",
            "split_key_in_buffer",
        ),
        _SCALES,
    ),
    **dict.fromkeys(
        (
            "copy_forward_fp8_meta_tensors_for_recompute",
            "get_old_fp8_meta_tensors_for_recompute", "restore_fp8_meta_tensors",
        ),
        "te.checkpoint computes again with the scales of the first time",
    ),
    **dict.fromkeys(
        ("autocast_enter", "autocast_exit", "get_unique_autocast_key"),
        "enter te.autocast",
    ),
    "is_first_fp8_module": "a region and its backward pass know their first module themselves",
    "quantization_state": "ask is_fp8_enabled, get_fp8_recipe and the like",
}  # fmt: skip


class _Names(type):
    """The class of what has no state to share, which says so."""

    def __getattr__(cls, name: str) -> Any:
        why = _LEFT_OUT.get(name)
        raise AttributeError(
            f"{cls.__name__} has no attribute '{name}'"
            if why is None
            else f"{cls.__name__}.{name} is not supported here: {why}"
        )


class FP8GlobalStateManager(metaclass=_Names):
    """The region around a call, as programs ask for it. It belongs to its thread."""

    _skip: Optional[torch.Tensor] = None

    @classmethod
    def reset(cls) -> None:
        """Forgets what was set here. What is set by a region ends with it."""
        cls._skip = None
        set_region(None)

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules compute in a recipe here."""
        return region().told.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether modules were told to note the amaxes that a recipe keeps."""
        return region().told.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether new modules have their weights as codes alone."""
        return of_new_weights.get()[0]

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether they keep what these weights began with."""
        return of_new_weights.get()[1]

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a CUDA graph is being captured."""
        if torch.compiler.is_compiling() or not torch.cuda.is_available():
            return False
        return torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """The recipe of this region, or the default one."""
        recipe = region().told.recipe
        return get_default_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Optional[Any]:
        """The workers that agree on amaxes."""
        return region().told.group

    @classmethod
    def get_autocast_state(cls) -> tuple:
        """What modules follow here, for :meth:`set_autocast_state`."""
        return region()

    @classmethod
    def set_autocast_state(cls, state: tuple) -> None:
        """Has modules follow what they followed at :meth:`get_autocast_state`."""
        if not isinstance(state, Region):
            raise TypeError(
                "set_autocast_state: expected what get_autocast_state() gave, "
                f"got {type(state).__name__}"
            )
        set_region(state)

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Says that weights are those of the call before. It is noted and changes nothing: codes
        are made again of weights that changed, and graphs make them again at every call.
        """
        if cls._skip is None:
            cls._skip = torch.empty(1, dtype=torch.float32, device=_machine.place(None))
        cls._skip.fill_(skip)

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Optional[torch.Tensor]:
        """What was said last, or None."""
        return cls._skip

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

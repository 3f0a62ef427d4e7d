"""The quantizers of a module under TransformerEngine's names: ``module.quantizers`` and
``module.fp8_meta``. Modules here compute from specs; these are made when a program asks for them.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ._format import fp8_dtype
from ._roles import DelayedScalingRequest, QuantizerRole

_TYPES = {
    "forward": ("input", "weight", "output"),
    "backward": ("grad_output", "grad_input"),
}
_KNOWN = sum(_TYPES.values(), ())


def _te() -> Any:
    import nvfp4.te  # which imports this file

    return nvfp4.te


class RecipeState:
    """The quantizers that a recipe gives the tensors of one pass, ``mode``, of a module."""

    # The tensors that outlive a state that is made anew.
    _persistent_state_buffers: ClassVar[Tuple[str, ...]] = ()

    def __init__(
        self,
        recipe: Any,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Optional[torch.device] = None,
        roles: Optional[List[Optional[QuantizerRole]]] = None,
    ) -> None:
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(
                f"RecipeState requires roles to match num_quantizers ({len(roles)=} vs {num_quantizers=})"
            )
        if mode not in _TYPES:
            raise RuntimeError(f"Unexpected recipe mode ({mode})")
        self.recipe, self.mode, self.num_quantizers, self.roles = (
            recipe,
            mode,
            num_quantizers,
            roles,
        )
        self.device = _te()._machine.place(device)

    @staticmethod
    def create(
        recipe: Any,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Optional[torch.device] = None,
        roles: Optional[List[Optional[QuantizerRole]]] = None,
    ) -> "RecipeState":
        """The state of a recipe of any kind."""
        for asked, kind in _KINDS.items():
            if getattr(recipe, asked)():
                return kind(
                    recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles
                )
        raise ValueError(f"{type(recipe).__name__} is not supported")

    def _slot_role(self, idx: int) -> QuantizerRole:
        role = None if self.roles is None else self.roles[idx]
        return QuantizerRole() if role is None else role

    def _slot_tensor_type(self, idx: int) -> str:
        """What a tensor is: what its role says, or what stands at this place."""
        known = self._slot_role(idx).tensor_type
        types = _TYPES[self.mode]
        return known if known in _KNOWN else types[idx % len(types)]

    def make_quantizers(self) -> list:
        """A quantizer for each tensor."""
        return [
            self._quantizer(idx, self._slot_tensor_type(idx)) for idx in range(self.num_quantizers)
        ]

    def _quantizer(self, idx: int, kind: str) -> Any:
        raise NotImplementedError

    def inherit_state_from(self, other: "RecipeState") -> bool:
        """Takes over the tensors that outlive a state; says whether there were any."""
        names = self._persistent_state_buffers
        if type(self) is not type(other) or not names:
            return False
        if any(getattr(self, name).shape != getattr(other, name).shape for name in names):
            return False
        for name in names:
            setattr(self, name, getattr(other, name))
        return True


class DelayedScalingRecipeState(RecipeState):
    """Scales of one pass from earlier steps: ``scale`` and ``amax_history``, a column for each
    tensor.
    """

    _persistent_state_buffers = ("scale", "amax_history")

    def __init__(self, recipe: Any, **settings: Any) -> None:
        super().__init__(recipe, **settings)
        self.dtype = fp8_dtype(recipe.fp8_format, self.mode == "forward")
        self.scale = torch.ones(self.num_quantizers, device=self.device)
        steps = recipe.amax_history_len
        self.amax_history = torch.zeros(steps, self.num_quantizers, device=self.device)

    def _quantizer(self, idx: int, kind: str) -> Any:
        amax = self.amax_history[0][idx].reshape((1,))
        return _te().Float8Quantizer(self.scale[idx], amax, self.dtype)


class Float8CurrentScalingRecipeState(RecipeState):
    """FP8 with scales from the tensors themselves."""

    def _quantizer(self, idx: int, kind: str) -> Any:
        recipe = self.recipe
        params = {
            "weight": recipe.fp8_quant_fwd_weight, "grad_output": recipe.fp8_quant_bwd_grad,
            "grad_input": recipe.fp8_quant_bwd_grad,
        }.get(kind, recipe.fp8_quant_fwd_inp)  # fmt: skip
        return _te().Float8CurrentScalingQuantizer(
            fp8_dtype(recipe.fp8_format, self.mode == "forward"), self.device,
            force_pow_2_scales=params.power_2_scale, amax_epsilon=params.amax_epsilon,
        )  # fmt: skip


class MXFP8BlockScalingRecipeState(RecipeState):
    """MXFP8, of squares for weights if the recipe says so."""

    def _quantizer(self, idx: int, kind: str) -> Any:
        role = self._slot_role(idx)
        linear = role.module_type in ("linear", "grouped_linear")
        squares = self.recipe.enable_2d_quantization and self.mode == "forward"
        dtype = fp8_dtype(self.recipe.fp8_format, self.mode == "forward")
        of_weight = linear and role.tensor_type == "weight"
        return _te().MXFP8Quantizer(dtype, with_2d_quantization=squares and of_weight)


class Float8BlockScalingRecipeState(RecipeState):
    """FP8 in blocks, which the recipe gives each kind of tensor."""

    def _quantizer(self, idx: int, kind: str) -> Any:
        recipe = self.recipe
        if kind == "weight":
            params, dim = recipe.fp8_quant_fwd_weight, recipe.w_block_scaling_dim
        elif kind in _TYPES["backward"]:
            params, dim = recipe.fp8_quant_bwd_grad, recipe.grad_block_scaling_dim
        else:
            params, dim = recipe.fp8_quant_fwd_inp, recipe.x_block_scaling_dim
        return _te().Float8BlockQuantizer(
            fp8_dtype(recipe.fp8_format, kind not in _TYPES["backward"]), rowwise=True, columnwise=True,
            amax_epsilon=params.amax_epsilon, force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=dim,
        )  # fmt: skip


class NVFP4BlockScalingRecipeState(RecipeState):
    """NVFP4, with what the recipe says of each kind of tensor."""

    def _quantizer(self, idx: int, kind: str) -> Any:
        recipe = self.recipe
        backward = kind in _TYPES["backward"]
        params = recipe.fp4_quant_bwd_grad if backward else recipe.fp4_quant_fwd_inp
        params = recipe.fp4_quant_fwd_weight if kind == "weight" else params
        scope = "weights" if kind == "weight" else "activations"
        four = not backward and recipe.nvfp4_4over6 in (scope, "all")
        if four and (params.random_hadamard_transform or params.stochastic_rounding):
            what = "RHT" if params.random_hadamard_transform else "stochastic rounding"
            raise ValueError(f"NVFP4 4over6 quantization does not support {what}.")
        small = four and recipe.nvfp4_4over6_e4m3_use_256 in (scope, "all")
        return _te().NVFP4Quantizer(
            with_rht=params.random_hadamard_transform,
            with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=self.mode == "forward" and kind != "weight" and recipe.row_scaled_activation,
            nvfp4_use_4over6=four, nvfp4_e4m3_max=256 if small else 448,
            nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
        )  # fmt: skip


class CustomRecipeState(RecipeState):
    """Quantizers that a factory gives. Requests for delayed scaling have one state together."""

    def __init__(self, recipe: Any, **settings: Any) -> None:
        if getattr(recipe, "qfactory", None) is None:
            raise ValueError("CustomRecipe requires `qfactory`.")
        super().__init__(recipe, **settings)
        self._ds_state: Optional[DelayedScalingRecipeState] = None
        self._inherited: Optional[DelayedScalingRecipeState] = None

    def make_quantizers(self) -> list:
        roles: List[Any] = list(self.roles or ())
        if self.roles is None:
            warnings.warn(
                "CustomRecipeState: no QuantizerRole list provided by the module/op. "
                "Falling back to bare QuantizerRole() defaults.",
                stacklevel=2,
            )
            roles = [QuantizerRole()] * self.num_quantizers
        made = [self.recipe.qfactory(role) for role in roles]
        for slot, one in enumerate(made):
            if one is None:
                raise ValueError(
                    f"CustomRecipe qfactory returned None for slot {slot} (role={roles[slot]}); "
                    "return an IdentityQuantizer to leave a tensor in high precision"
                )
        delayed = [slot for slot, one in enumerate(made) if isinstance(one, DelayedScalingRequest)]
        self._ds_state = self._delayed([made[slot] for slot in delayed]) if delayed else None
        if self._ds_state is not None:
            for slot, quantizer in zip(delayed, self._ds_state.make_quantizers()):
                made[slot] = quantizer
        return made

    def _delayed(self, requests: List[DelayedScalingRequest]) -> DelayedScalingRecipeState:
        for slot, request in enumerate(requests):
            for name, value in vars(request).items():
                first = getattr(requests[0], name)
                if value != first:
                    raise ValueError(
                        "All DelayedScalingRequests in one CustomRecipeState must match. "
                        f"Slot 0 has {name}={first!r}, slot {slot} has {value!r}."
                    )
        recipe = _te().DelayedScaling(**vars(requests[0]))
        made = DelayedScalingRecipeState(
            recipe, mode=self.mode, num_quantizers=len(requests), device=self.device
        )
        old, self._inherited = self._inherited, None
        if (
            old is not None
            and old.dtype == made.dtype
            and old.amax_history.shape == made.amax_history.shape
        ):
            return old
        return made

    def inherit_state_from(self, other: RecipeState) -> bool:
        if not isinstance(other, CustomRecipeState) or other._ds_state is None:
            return False
        self._inherited = other._ds_state
        return True

    @property
    def _has_delayed_scaling(self) -> bool:
        return self._ds_state is not None

    @property
    def _inner_delayed_scaling_recipe(self) -> Any:
        return None if self._ds_state is None else self._ds_state.recipe

    @property
    def amax_history(self) -> Optional[Tensor]:
        """The amaxes of earlier steps, if a tensor has delayed scaling."""
        return None if self._ds_state is None else self._ds_state.amax_history

    @property
    def scale(self) -> Optional[Tensor]:
        """The scales from earlier steps, if a tensor has them."""
        return None if self._ds_state is None else self._ds_state.scale


_KINDS: Dict[str, Any] = {
    "custom": CustomRecipeState, "delayed": DelayedScalingRecipeState,
    "mxfp8": MXFP8BlockScalingRecipeState, "nvfp4": NVFP4BlockScalingRecipeState,
    "float8_current_scaling": Float8CurrentScalingRecipeState,
    "float8_block_scaling": Float8BlockScalingRecipeState,
}  # fmt: skip

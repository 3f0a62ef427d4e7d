"""``module.quantizers`` and ``module.fp8_meta``: what TransformerEngine's modules show of their
recipe. Nothing is computed from them, but the scales of delayed scaling are the module's own.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Optional

import torch

from ._codes import bind_codes
from ._recipe import region
from ._roles import QuantizerRole
from ._states import DelayedScalingRecipeState, RecipeState
from .recipe import Recipe

_KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
_SLOTS = {"forward": ("input", "weight"), "backward": ("grad_output",)}


class ShowsQuantizers(torch.nn.Module):
    """A module with the quantizers of the recipe that it was last called in."""

    _asked: Any = None
    _output_quantizer_role: Optional[QuantizerRole] = None
    _grad_input_quantizer_role: Optional[QuantizerRole] = None
    # What is shown: the recipe, and for each pass a state and its quantizers.
    _shown: Optional[Dict[str, Any]] = None
    # Whether a role changed since.
    _stale: bool = False

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether what is shown is that of the last recipe and of these roles."""
        return (self._asked is not None or self._shown is not None) and not self._stale

    @property
    def output_quantizer_role(self) -> Optional[QuantizerRole]:
        """Who reads the output."""
        return self._output_quantizer_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: Optional[QuantizerRole]) -> None:
        self._change_role("_output_quantizer_role", role)

    @property
    def grad_input_quantizer_role(self) -> Optional[QuantizerRole]:
        """Who reads the gradient of the input."""
        return self._grad_input_quantizer_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: Optional[QuantizerRole]) -> None:
        self._change_role("_grad_input_quantizer_role", role)

    def _change_role(self, name: str, role: Optional[QuantizerRole]) -> None:
        if getattr(self, name) != role:
            self.__dict__.update({name: role, "_stale": self.fp8_meta_tensors_initialized})

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> List[Optional[QuantizerRole]]:
        """The roles of the tensors of a pass. Those of the output and of the input's gradient are
        their readers', and None if no one is known.
        """
        sites = self.sites_of(self, getattr(self, "name", None) or "")  # type: ignore[operator]
        kind = "grouped_linear" if len(sites[0]) > 2 else "linear"
        names = [site[0].removeprefix(".") for site in sites]

        def role(at: int, tensor: str) -> QuantizerRole:
            return QuantizerRole(kind, tensor, names[at])

        last, of = len(names) - 1, []
        for at in range(len(names)):
            # What lies between two products of one module is the next one's.
            output = self._output_quantizer_role if at == last else role(at + 1, "input")
            before = self._grad_input_quantizer_role if at == 0 else role(at - 1, "grad_output")
            forward = [role(at, "input"), role(at, "weight"), output]
            of += forward if fwd else [role(at, "grad_output"), before]
        return [of[at % len(of)] for at in range(num_quantizers)]

    def _ask_about_edges(self, recipe: Any) -> None:
        """Asks a factory about the output and the input's gradient too, as TransformerEngine does.
        Nothing is quantized for them here: what it answers or raises changes nothing.
        """
        factory, number = getattr(recipe, "qfactory", None), self._groups()
        if factory is None:
            return
        outputs = self.get_quantizer_roles(fwd=True, num_quantizers=3 * number)[2::3]
        gradients = self.get_quantizer_roles(fwd=False, num_quantizers=2 * number)[1::2]
        for role in (*outputs, *gradients):
            with contextlib.suppress(Exception):
                factory(role)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Makes what is shown, of the recipe of the region around it, if it is not there yet."""
        asked = region().asked
        shown = None if self._shown is None else self._shown["recipe"]
        if isinstance(asked, Recipe) and shown is not asked:
            self.init_fp8_meta_tensors(asked)

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        """Makes what is shown, of this recipe. Scales of earlier steps stay."""
        of, old = self._recipe_of(recipe), self._shown
        made: Dict[str, Any] = {"recipe": recipe, "quantizers": {}}
        numbers = self._groups()
        for mode, key in _KEYS.items():
            count = numbers * (3 if mode == "forward" else 2)
            roles = self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=count)
            state = RecipeState.create(
                of, mode=mode, num_quantizers=count, roles=roles,
                device=self._home(),  # type: ignore[operator]
            )  # fmt: skip
            kept = old is not None and state.inherit_state_from(old[key])
            made["quantizers"][key] = state.make_quantizers()
            made[key] = state
            if not kept:
                self._share_scales(mode, made[key], made["quantizers"][key])
        self.__dict__.update(_shown=made, _stale=False)

    def _recipe_of(self, recipe: Any) -> Any:
        """The recipe that gives this module its quantizers."""
        return recipe

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        """Makes what is shown of a pass, and of the other one with it, if it is of another recipe."""
        if self._shown is None or self._shown["recipe"] is not recipe:
            self.init_fp8_meta_tensors(recipe)

    def _states(self) -> Dict[str, Any]:
        """The states that are shown of delayed scaling, by their passes' keys."""
        shown = self._show()
        of = {key: getattr(shown.get(key), "_ds_state", shown.get(key)) for key in _KEYS.values()}
        kind = DelayedScalingRecipeState
        return {key: state for key, state in of.items() if isinstance(state, kind)}

    def get_fp8_meta_tensors(self) -> Optional[Dict[str, List[torch.Tensor]]]:
        """Copies of the scales and amaxes of delayed scaling, by passes, if there are any."""
        states = self._states()
        return {
            key: [state.scale.clone(), state.amax_history.clone()] for key, state in states.items()
        } or None

    def reset_fp8_meta_tensors(
        self, fp8_meta_tensors: Optional[Dict[str, List[torch.Tensor]]] = None
    ) -> None:
        """Begins the scales and amaxes of delayed scaling again: from 1 and without amaxes, or from
        what :meth:`get_fp8_meta_tensors` gave.
        """
        with torch.no_grad():
            delayed = getattr(self, "delayed", None) if fp8_meta_tensors is None else None
            for kept in () if delayed is None else delayed.children():
                kept.scale.fill_(1)
                kept.history.zero_()
                kept.before = None
            for key, state in self._states().items():
                if fp8_meta_tensors is None:
                    state.scale.fill_(1)
                    state.amax_history.zero_()
                    continue
                if key not in fp8_meta_tensors:
                    raise KeyError(f"fp8_meta_tensors: expected '{key}' among {list(fp8_meta_tensors)}")
                scale, history = fp8_meta_tensors[key]
                state.scale.copy_(scale)
                state.amax_history.copy_(history)
        self.forget_weights()  # type: ignore[operator]

    def _share_scales(self, mode: str, state: Any, quantizers: List[Any]) -> None:
        """Moves the module's scales of earlier steps to where they are shown."""
        state = getattr(state, "_ds_state", state)
        delayed = getattr(self, "delayed", None)
        if not isinstance(state, DelayedScalingRecipeState) or delayed is None:
            return
        shown = [at for at, one in enumerate(quantizers) if hasattr(one, "scale") and hasattr(one, "amax")]
        for name, at in self._places(mode).items():
            own = delayed._modules.get(name)
            if own is None or at not in shown:
                continue
            column = shown.index(at)
            state.amax_history[:, column].copy_(own.history)
            state.scale[column : column + 1].copy_(own.scale)
            own.history, own.scale = state.amax_history[:, column], state.scale[column : column + 1]
        bind_codes(self)

    def _groups(self) -> int:
        """How many times three quantizers forward and two backward there are."""
        return len(self._products)  # type: ignore[arg-type]

    def _places(self, mode: str) -> Dict[str, int]:
        """Where tensors that the module keeps scales for are among the quantizers of a pass."""
        step = 3 if mode == "forward" else 2
        return {
            prefix + name: number * step + slot
            for number, (prefix, _, _) in enumerate(self._products)  # type: ignore[arg-type]
            for slot, name in enumerate(_SLOTS[mode])
        }

    def _show(self) -> Dict[str, Any]:
        of = None if self._shown is None else self._shown["recipe"]
        if self._asked is not None and (self._stale or of is not self._asked):
            self.init_fp8_meta_tensors(self._asked)
        return self._shown or {"recipe": None, "quantizers": {key: [] for key in _KEYS.values()}}

    @property
    def quantizers(self) -> Dict[str, List[Any]]:
        """The quantizers of both passes, three for each product forward and two backward."""
        return self._show()["quantizers"]

    @property
    def fp8_meta(self) -> Dict[str, Any]:
        """The recipe and the states of both passes."""
        return self._show()

"""What calibration watches in a model of transformers beside its linear layers: experts in one
parameter, keys and values, and the names that its checkpoint has.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

from ._experts import Experts
from ._names import Names, is_experts


class Watch:
    """A model that is calibrated."""

    def __init__(self, model: Any):
        self._model, self._names = model, Names(model)
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:  # it was not loaded, so nothing says which prefix a file would have
            known = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [one for one in known if not isinstance(one, PrefixChange)]
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        self._back: List[Any] = [one.reverse_transform() for one in reversed(renamings)]
        self._attention: Dict[int, str] = {}
        for name, module in model.named_modules():
            if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__:
                self._attention.setdefault(module.layer_idx, name)

    def named(self, name: str) -> str:
        """A module's name in the checkpoint."""
        return apply_renamings(f"{name}.weight", self._back).removesuffix(".weight")

    def hooks(self, name: str, module: torch.nn.Module, found: Any) -> List[Any]:
        """Hooks on a module with experts."""
        if isinstance(module, Experts):
            count = lambda _, args: found.routed(name, _counts(args[1], module.num_experts))  # noqa: E731
            return [module.register_forward_pre_hook(count)]
        if not is_experts(module):
            return []
        lasts = self._names.lasts(name)[0]

        def take(of: Any, args: Any) -> None:
            hidden, index, _ = args
            hidden = hidden.reshape(-1, hidden.shape[-1])
            found.routed(name, _counts(index, of.num_experts))
            for expert in range(of.num_experts):
                x = hidden[torch.where(index == expert)[0]]
                if x.shape[0]:
                    *before, down = lasts
                    for last in before:
                        found.input(f"{name}.{expert}.{last}", x)
                    found.input(f"{name}.{expert}.{down}", _inner(of, expert, x))

        return [module.register_forward_pre_hook(take)]

    def given(self, found: Any) -> Dict[str, Any]:
        """Arguments of a call: a cache that sees keys and values."""
        names = self._attention
        if not names:
            return {}

        class Cache(DynamicCache):
            def update(self, key_states, value_states, layer_idx, *args, **kwargs):
                if layer_idx in names:
                    found.cached(names[layer_idx], key_states, value_states)
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        return {"past_key_values": Cache(config=self._model.config), "use_cache": True}


def _counts(index: torch.Tensor, experts: int) -> List[int]:
    return torch.bincount(index.reshape(-1), minlength=experts).tolist()


def _inner(of: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What an expert's last product takes."""
    matrix, bias = ("gate_up_proj", "gate_up_proj_bias") if of.has_gate else ("up_proj", "up_proj_bias")
    weight = getattr(of, matrix)[expert]
    made = torch.nn.functional.linear(x, weight.t() if of.is_transposed else weight)
    if of.has_bias:
        made = made + getattr(of, bias)[expert]
    return of._apply_gate(made) if of.has_gate else of.act_fn(made)

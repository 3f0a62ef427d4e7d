"""Names of a checkpoint in a model of transformers, which renames and joins tensors while it loads."""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings

_NUMBERED = re.compile(r"(.+)\.(\d+)\.([^.]+)")


class OfExpert(NamedTuple):
    """The name of a matrix of one expert."""

    experts: str
    number: int
    last: str


def is_experts(module: Any) -> bool:
    """Whether a module has the experts of a layer in one parameter, in the way that all such modules
    of transformers share: products, ``_apply_gate`` between them, and the router's choice as given.
    """
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate"))


class Names:
    """Where a model has what a checkpoint names."""

    def __init__(self, model: Any):
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.modules: Dict[str, torch.nn.Module] = dict(model.named_modules())
        self._prefix = model.base_model_prefix

    def module(self, name: str) -> Optional[str]:
        """A module by its name in the checkpoint; None if the model does not have it."""
        return self._there(self._renamed(name))

    def check_absent(self, name: str) -> None:
        """Raises if a module that is not there should be: if the model has what it is a part of.

        What lies beside the model (vision in a text model) or behind its last layer (heads that
        predict several tokens) may be absent.
        """
        parent, _, last = self._renamed(name).rpartition(".")
        while parent and self._there(parent) is None:
            parent, _, last = parent.rpartition(".")
        found = self._there(parent) if parent else None
        if found is None or found in ("", self._prefix):
            return
        module = self.modules[found]
        if isinstance(module, torch.nn.ModuleList) and last.isdecimal() and int(last) >= len(module):
            return
        raise ValueError(f"{name}: {found} is a {type(module).__name__}, which has no '{last}' that could take its codes")

    def expert(self, name: str) -> Optional[OfExpert]:
        """A matrix of an expert whose module has all of them in one parameter."""
        matched = _NUMBERED.fullmatch(self._renamed(name))
        experts = None if matched is None else self._there(matched[1])
        if matched is None or experts is None or not is_experts(self.modules[experts]):
            return None
        return OfExpert(experts, int(matched[2]), matched[3])

    def converter(self, module: str) -> Optional[WeightConverter]:
        """What transformers makes other tensors by of the weight of a module."""
        return next((one for one in self._converters if converts(one, module)), None)

    def lasts(self, experts: str) -> List[List[str]]:
        """What the matrices of an expert may be called: gate, up and down, or up and down."""
        gated = bool(self.modules[experts].has_gate)
        named: Dict[str, List[str]] = {}
        for one in self._converters:
            target = one.target_patterns[0].replace("\\", "").rpartition(".")[2]
            sources = [source.replace("\\", "").split(".")[-2] for source in one.source_patterns if source.count(".") > 1]
            joins = any("*" in source for source in one.source_patterns)
            if joins and target in ("gate_up_proj", "up_proj", "down_proj"):
                named[target] = sources
        found = [["gate_proj", "up_proj", "down_proj"]] if gated else [["up_proj", "down_proj"]]
        first = named.get("gate_up_proj" if gated else "up_proj")
        if first is not None and "down_proj" in named:
            found.insert(0, [*first, *named["down_proj"]])
        return found

    def _renamed(self, name: str) -> str:
        return apply_renamings(f"{name}.weight", self._renamings).removesuffix(".weight")

    def _there(self, name: str) -> Optional[str]:
        """A name with or without the prefix of the model inside of the model."""
        for candidate in (name, f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}.")):
            if candidate in self.modules:
                return candidate
        return None


def converts(converter: WeightConverter, module: str) -> bool:
    """Whether a conversion of transformers takes the weight of this module."""
    return converter.compiled_sources.search(f"{module}.weight") is not None

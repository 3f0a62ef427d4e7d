"""How the parameters of modules begin: TransformerEngine's ``init_method``, its trackers of random
states, and modules that are made on the meta device.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ._machine import place

Method = Callable[[Tensor], Any]


def normal(tensor: Tensor) -> Tensor:
    """How weights begin without an ``init_method``."""
    return torch.nn.init.normal_(tensor, mean=0.0, std=0.023)


def random_state(tracker: Optional[Callable[[], Any]], name: Optional[str] = None):
    """Inside, random numbers are those of a tracker's state, if there is a tracker."""
    if tracker is None:
        return contextlib.nullcontext()
    return tracker().fork(name) if name else tracker().fork()


class Initial(NamedTuple):
    """How weights begin, by the beginnings of their names: the first that fits counts.

    Biases begin as zeros, and norms as what leaves a number alone.
    """

    methods: Tuple[Tuple[str, Optional[Method]], ...] = (("", None),)
    tracker: Optional[Callable[[], Any]] = None
    tracker_name: Optional[str] = None
    zero_centered_gamma: bool = False

    def begin(self, name: str, parameter: Tensor) -> None:
        if name.endswith("layer_norm_weight"):
            torch.nn.init.constant_(parameter, 0.0 if self.zero_centered_gamma else 1.0)
        elif "bias" in name:
            torch.nn.init.zeros_(parameter)
        else:
            method = next(method for prefix, method in self.methods if name.startswith(prefix))
            with random_state(self.tracker, self.tracker_name):
                (method or normal)(parameter)


class Begins(torch.nn.Module):
    """A module whose parameters begin as its ``_initial`` says.

    It has that before it has parameters: its bases begin them while they make them.
    """

    _initial: Initial
    # How its weight is to be split, and the beginnings of the names of the parts that there are.
    _split: Any = None
    _parts: List[str] = []
    _made: bool = False

    def begins(self, initial: Initial, parameters_split: Any = None) -> None:
        """Says how parameters begin, before there are any."""
        self.__dict__.update(_initial=initial, _split=parameters_split)

    def made(self, name: Optional[str], return_bias: bool, fuse_wgrad_accumulation: bool) -> None:
        """Says that its bases have made all parameters, and what all modules are told."""
        self.name, self.return_bias = name, return_bias
        biases = ("bias", "bias0", "fc1_bias")
        self.use_bias = any(self._parameters.get(of) is not None for of in biases)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        if self._split is not None:
            self._parts = split(self, self._split)
            self.reset_parameters()
        self._made = True

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        """Begins the parameters again. Those on the meta device become real, on torch's default
        device, unless it is deferred.
        """
        if defer_init or (self._split is not None and not self._parts):
            return
        if self._made:
            made_real(self)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    self._initial.begin(name, parameter)


def made_real(module: torch.nn.Module) -> None:
    """Moves the module's own parameters from the meta device to torch's default device."""
    device = torch.device(place(None) or torch.get_default_device())
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and device.type != "meta":
            real = torch.nn.Parameter(
                torch.empty_like(parameter, device=device), parameter.requires_grad
            )
            for key, value in parameter.__dict__.items():
                real.__dict__.setdefault(key, value)
            module._parameters[name] = real


def sizes_of(parameters_split: Any, out_features: int) -> Dict[str, int]:
    """The sizes of the parameters that ``parameters_split`` asks for, by the beginnings of their
    names.
    """
    if isinstance(parameters_split, dict):
        sizes = {name.rstrip("_"): size for name, size in parameters_split.items()}
    else:
        names: List[str] = [name.rstrip("_") for name in parameters_split]
        sizes = {name: out_features // len(names) for name in names}
    if not sizes or sum(sizes.values()) != out_features:
        raise ValueError(
            f"parameters_split: expected sizes that add up to {out_features}, got {sizes}"
        )
    return sizes


def split(module: torch.nn.Module, parameters_split: Any) -> List[str]:
    """Splits ``weight`` and ``bias`` of a module into several parameters. Gives the beginnings of
    their names: ``query`` for ``query_weight`` and ``query_bias``.
    """
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    sizes = sizes_of(parameters_split, weight.shape[0])
    for kind, whole in (("weight", weight), ("bias", bias)):
        setattr(module, kind, None)
        for name, size in sizes.items():
            part = None if whole is None else whole.new_empty(size, *whole.shape[1:])
            module.register_parameter(
                f"{name}_{kind}", None if part is None else torch.nn.Parameter(part)
            )
    return list(sizes)


def joined(module: torch.nn.Module, kind: str, parts: List[str]) -> Optional[Tensor]:
    """The weight or the bias of a module, of its parts if it was split."""
    if not parts:
        return getattr(module, kind)
    found: List[Tensor] = [getattr(module, f"{part}_{kind}") for part in parts]
    return None if found[0] is None else torch.cat(found)

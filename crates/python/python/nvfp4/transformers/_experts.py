"""The experts of a layer, as linear layers: in the place of a module of transformers that has them in
one parameter.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import Tensor

# What a module of transformers has of its experts.
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_KNOWN = {*_MATRICES, *(f"{name}_bias" for name in _MATRICES)}


class Expert(torch.nn.Module):
    """The matrices of one expert, under their names in the checkpoint."""


class Experts(torch.nn.Module):
    """The experts of a layer, each with linear layers of its own.

    ``of`` is the module of transformers in whose place it is: between the products it says what to
    do. ``lasts`` are the names of an expert's layers: gate, up and down; gate and up in one, and
    down; or up and down.
    """

    of: Any
    post_expert_norm: Any

    def __init__(self, of: Any, path: str, lasts: List[str]):
        super().__init__()
        first = of.gate_up_proj if of.has_gate else of.up_proj
        unknown = [name for name, _ in of.named_parameters(recurse=False) if name not in _KNOWN]
        if unknown:
            raise ValueError(f"{path}: {type(of).__name__} has {', '.join(unknown)}, which our experts do not know")
        self.num_experts, self.lasts, self.dtype = first.shape[0], lasts, first.dtype
        self.hidden = of.down_proj.shape[2 if of.is_transposed else 1]
        self.inner = of.down_proj.shape[1 if of.is_transposed else 2]
        for name, child in of.named_children():  # activations that learn, a norm of outputs
            self.add_module(name, child)
        for name in list(of._parameters):
            del of._parameters[name]
        self.__dict__["of"] = of

    def sizes(self) -> Dict[str, Any]:
        """Outputs and inputs of each layer of an expert."""
        *before, down = self.lasts
        outputs = self.inner * (2 if self.of.has_gate and len(before) == 1 else 1)
        return {**{name: (outputs, self.hidden) for name in before}, down: (self.hidden, self.inner)}

    def add(self, number: int, bias: bool) -> None:
        """Makes the layers of an expert, without memory."""
        expert = Expert()
        for name, (outputs, inputs) in self.sizes().items():
            expert.add_module(name, torch.nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=self.dtype))
        self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, choices = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)
        numbers = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
        parts = hidden_states[order // choices].split(numbers)
        outputs = [self._expert(number, x) for number, x in enumerate(parts) if x.shape[0]]
        if not outputs:
            return torch.zeros_like(hidden_states)
        y = torch.cat(outputs)[order.argsort()]
        y = y.view(tokens, choices, -1) * top_k_weights.unsqueeze(-1)
        return y.sum(1).to(hidden_states.dtype)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        expert = self._modules[str(number)]
        *before, down = (getattr(expert, name) for name in self.lasts)
        made = [layer(x) for layer in before]
        if not self.of.has_gate:
            inner = self.of.act_fn(made[0])
        else:
            inner = self.of._apply_gate(made[0] if len(made) == 1 else self._joined(*made))
        y = down(inner)
        return self.post_expert_norm(y) if getattr(self.of, "has_post_expert_norm", False) else y

    def _joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate and up as the module of transformers has them."""
        return torch.cat([gate, up], -1) if self.of.is_concatenated else torch.stack([gate, up], -1).flatten(-2)


def in_place(model: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    """Puts a module in the place of another."""
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, last, module)

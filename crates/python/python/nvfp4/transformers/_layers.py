"""A linear layer on its way from the tensors of a checkpoint to codes, and back to them."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import Tensor

from ..torch._blocks import parts_of
from ..torch._linear import Linear, become
from ..torch._load import amax_of, codes_of_parts, put, recipe_of
from ..torch._stored import Form, Stored, decoded
from ._experts import Experts


class Coming:
    """A layer of a model that gets the tensors of a checkpoint under the names that they have there.
    They are buffers until all are loaded.
    """

    def __init__(self, module: Any, path: str, stored: Stored, activations: str):
        self.module, self.path, self.stored, self.dtype = module, path, stored, module.weight.dtype
        self.input: Optional[Tensor] = None
        form = stored.form
        self.quantizes_input = form is not None and form.input in stored.parts and activations == "file"
        codes = stored.parts["weight" if form is None else form.codes][1]
        found = (codes[0], codes[1] * (1 if form is None else 2)) if len(codes) == 2 else codes
        if found != tuple(module.weight.shape):
            raise ValueError(f"{path}: the model's weight is {tuple(module.weight.shape)}, the checkpoint's {found}")
        if self.quantizes_input:  # before others wrap its forward pass
            become(module, Linear, path, 0)
            module.use_recipe(recipe_of("nvfp4"))
        del module._parameters["weight"]
        expect(module, stored)

    def arrive(self) -> None:
        """Makes the layer one of codes."""
        parts = taken(self.module, self.path, self.stored)
        form = self.stored.form
        if form is None:
            scale = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
            self.module._parameters["weight"] = torch.nn.Parameter(decoded(self.path, parts["weight"], scale).to(self.dtype))
            return
        self.input = parts.get(form.input)
        amax = None
        if self.input is not None and self.quantizes_input:
            amax = amax_of(f"{self.path}.{form.input}", form.spec, self.input)
        names = (form.codes, form.scales, form.tensor)
        give(self.module, self.path, form, [parts[name] for name in names], amax, self.dtype)

    def tensors(self) -> Dict[str, Tensor]:
        """What a checkpoint holds of the layer."""
        form, weight = self.stored.form, self.module.weight
        assert form is not None, "FP8 is not saved"
        codes, scales, tensor = parts_of(weight.codes.row, weight.spec, "row", weight.matrix)
        made = {form.codes: codes, form.scales: scales.view(torch.float8_e4m3fn), form.tensor: tensor}
        if self.input is not None:
            made[form.input] = self.input
        return {name: part.clone().reshape(self.stored.parts[name][1]) for name, part in made.items()}


class ComingTogether:
    """One matrix of all experts of a layer, in one tensor of a checkpoint."""

    def __init__(self, module: Experts, path: str, last: str, stored: Stored, activations: str):
        self.module, self.path, self.last, self.stored, self.activations = module, path, last, stored, activations
        outputs, inputs = module.sizes()[last]
        codes = stored.parts[last][1]
        if codes != (module.num_experts, inputs // 2, outputs):
            wanted = (module.num_experts, inputs, outputs)
            raise ValueError(f"{path}.{last}: the model's experts are {wanted}, the checkpoint's codes {codes}")
        expect(module, stored)
        if module.of.has_bias:
            shape = (module.num_experts, outputs)
            module.register_buffer(f"{last}_bias", torch.empty(shape, device="meta", dtype=module.dtype))

    def arrive(self) -> None:
        """Gives each expert its codes."""
        form, path = self.stored.form, f"{self.path}.{self.last}"
        assert form is not None
        parts = taken(self.module, self.path, self.stored)
        bias = self.module._buffers.pop(f"{self.last}_bias", None)
        codes, scales, tensor = (parts[self.last + suffix] for suffix in (form.codes, form.scales, form.tensor))
        given = parts.get(self.last + form.input)
        for number in range(self.module.num_experts):
            if str(number) not in self.module._modules:
                self.module.add(number, bias is not None)
            layer = getattr(self.module._modules[str(number)], self.last)
            # Inputs come before outputs in the file, and two of them share a byte.
            own = [codes[number].t(), scales[number].t(), _of(tensor, number)]
            amax = None
            if given is not None and self.activations == "file":
                amax = amax_of(f"{path}{form.input}", form.spec, _of(given, number))
            give(layer, f"{self.path}.{number}.{self.last}", form, own, amax, self.module.dtype)
            if bias is not None:
                layer.bias = torch.nn.Parameter(bias[number].clone())


def _of(numbers: Tensor, expert: int) -> Tensor:
    """The number of an expert, of one for all or one for each."""
    return numbers.reshape(-1)[expert if numbers.numel() > 1 else 0]


def expect(module: torch.nn.Module, stored: Stored) -> None:
    for name, (dtype, shape) in stored.parts.items():
        module._parameters.pop(name, None)
        module.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))


def taken(module: torch.nn.Module, path: str, stored: Stored) -> Dict[str, Tensor]:
    """What was loaded, which leaves the module."""
    parts: Dict[str, Any] = {name: module._buffers.pop(name) for name in stored.parts}
    away = [name for name, part in parts.items() if part.is_meta]
    if away:
        raise ValueError(f"{path}: {', '.join(away)} of the checkpoint did not arrive")
    return parts


def give(layer: Any, path: str, form: Form, parts: Any, amax: Optional[Tensor], dtype: torch.dtype) -> None:
    codes = codes_of_parts(f"{path}.weight", form.spec, *parts)
    # What it replaces says the type.
    layer._parameters["weight"] = torch.nn.Parameter(torch.empty(codes.matrix, dtype=dtype, device="meta"))
    put(layer, path, codes, amax)

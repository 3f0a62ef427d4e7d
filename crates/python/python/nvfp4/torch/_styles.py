"""The styles of ``parallelize_module`` for quantized layers."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as styles

from ._grouped import GroupedLinear
from ._layer import Layer
from ._norm import LayerNormLinear, LayerNormMLP


class ColwiseParallel(styles.ColwiseParallel):
    """torch's ``ColwiseParallel`` for quantized layers: tokens that are split among workers
    (``input_layouts=Shard(1)``) travel as codes. It takes ``LayerNormLinear`` too, whose norm each
    worker computes of its own tokens, and ``GroupedLinear``, which gathers tokens as they are.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        given: Any = self.input_layouts[0]
        if isinstance(module, LayerNormMLP):
            raise ValueError(f"{module.path}: a LayerNormMLP has two weights: use ColwiseRowwiseParallel")
        grouped = isinstance(module, GroupedLinear)
        if isinstance(module, Layer) and not grouped and given.is_shard() and given.dim >= 0:
            self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]
        if grouped or isinstance(module, LayerNormLinear):
            parts = lambda name: Replicate() if "norm" in name else Shard(0)
            return _spread(self, module, device_mesh, parts)
        return super()._apply(module, device_mesh)


class RowwiseParallel(styles.RowwiseParallel):
    """torch's ``RowwiseParallel`` for quantized layers: where tokens of the output are split among
    workers (``output_layouts=Shard(1)``), their gradients travel as codes. It takes
    ``GroupedLinear`` too, whose gradients travel as they are.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        given: Any = self.output_layouts[0]
        if isinstance(module, (LayerNormLinear, LayerNormMLP)):
            style = "ColwiseParallel" if isinstance(module, LayerNormLinear) else "ColwiseRowwiseParallel"
            raise ValueError(f"{module.path}: a norm reads all features of a token: use {style}")
        if isinstance(module, GroupedLinear):
            self.desired_input_layouts = (Shard(-1),)
            parts = lambda name: Shard(1) if "weight" in name else Replicate()
            return _spread(self, module, device_mesh, parts)
        if isinstance(module, Layer) and given.is_shard() and given.dim >= 0:
            module.output_layout = given  # type: ignore[assignment]
        return super()._apply(module, device_mesh)


class ColwiseRowwiseParallel(styles.ColwiseParallel):
    """For ``LayerNormMLP``: workers have some outputs of ``fc1`` and the same inputs of ``fc2``.
    Tokens that are split among workers before it (``input_layouts=Shard(1)``) and their gradients
    after it (``output_layouts=Shard(1)``) travel as codes. Without layouts, every worker has all
    tokens.
    """

    def __init__(
        self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True
    ):
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts or Replicate(),
            use_local_output=use_local_output,
        )

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        if not isinstance(module, LayerNormMLP):
            raise ValueError(f"ColwiseRowwiseParallel is for LayerNormMLP, not for {type(module).__name__}")
        if module.fc1_weight.shape[0] != module.fc2_weight.shape[1]:
            raise NotImplementedError(
                f"{module.path}: the activation has a gate, whose rows of fc1 lie apart from those that it "
                "gates; use te.LayerNormMLP with tp_group, or a LayerNormLinear for each and a Linear"
            )
        self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]
        if self.output_layouts[0].is_shard():
            module.output_layout = self.output_layouts[0]
        parts = {"fc1_weight": Shard(0), "fc1_bias": Shard(0), "fc2_weight": Shard(1)}
        return _spread(self, module, device_mesh, lambda name: parts.get(name, Replicate()))


def _spread(style: Any, module: Any, mesh: Any, placement: Callable[[str], Any]) -> torch.nn.Module:
    """Makes the parameters of a layer DTensors, and its input and output those of a style."""
    if hasattr(module, "following"):
        raise ValueError(f"{module.path}: modules of nvfp4.te are split by tp_group and parallel_mode")

    def partition(_: str, module: torch.nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, mesh, [placement(name)], src_data_rank=style.src_data_rank)
            module.register_parameter(name, torch.nn.Parameter(part, parameter.requires_grad))

    def enter(module: torch.nn.Module, inputs: Any, mesh: Any) -> Any:
        x = style._prepare_input_fn(style.input_layouts, style.desired_input_layouts, module, inputs, mesh)
        return (x, *inputs[1:])

    def leave(module: torch.nn.Module, y: Any, mesh: Any) -> Any:
        return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, y, mesh)

    return distribute_module(module, mesh, partition, enter, leave)

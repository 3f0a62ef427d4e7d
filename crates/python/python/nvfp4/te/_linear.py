"""Linear layers under TransformerEngine's names."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

import nvfp4.torch

from ._handover import handed_over
from ._initial import Begins, Initial, joined
from ._left_out import left_out
from ._machine import place
from ._modules import Follows
from ._parallel import Shards, all_tokens, divided, part, size_of
from ._signature import refuse, supports


class OneLinear(Shards, Begins, Follows):
    """A module with one linear layer."""

    return_bias: bool
    onnx_forward = left_out("onnx_forward")

    def weights(self) -> List[str]:
        # Parts of a weight are quantized together.
        return ["weight"] if self._split is None else []

    def _weight(self) -> Tensor:
        weight = joined(self, "weight", self._parts)
        assert weight is not None
        return weight

    def _bias(self, inp: Tensor) -> Optional[Tensor]:
        """The bias in the input's type, as it is returned."""
        bias = joined(self, "bias", self._parts)
        return None if bias is None else bias.to(inp.dtype)

    def _linear(self, inp: Tensor) -> Tensor:
        """The product, with the bias if that is not returned."""
        bias = None if self.return_bias else joined(self, "bias", self._parts)
        handed = handed_over(inp)
        return self.product(inp, self._weight(), bias, handed=handed)  # type: ignore[operator]

    def extra_repr(self) -> str:
        weight = self._weight()
        bias = any(
            "bias" in name and "norm" not in name and of is not None
            for name, of in self._parameters.items()
        )
        sizes = f"in_features={weight.shape[1]}, out_features={weight.shape[0]}, bias={bias}"
        norm = (
            f", normalization={self.normalization}, eps={self.eps}"
            if isinstance(self, Normed)
            else ""
        )
        return f"{sizes}{norm}, {self.formats}"


def _no_fusion_of_parts(where: str, fuse_wgrad_accumulation: bool, parameters_split: Any) -> None:
    if fuse_wgrad_accumulation and parameters_split is not None:
        raise ValueError(
            f"te.{where}: fuse_wgrad_accumulation needs one weight; leave out parameters_split"
        )


def _split_of(where: str, parameters_split: Any, mode: Optional[str], workers: int) -> Any:
    """A worker's part of each of the parameters that a weight is split into."""
    if mode != "column" or not isinstance(parameters_split, dict):
        return parameters_split
    sizes = parameters_split.items()
    return {name: divided(where, name, size, workers) for name, size in sizes}


class Linear(OneLinear, nvfp4.torch.Linear):
    """``transformer_engine.pytorch.Linear``."""

    # What is listed and not used below says nothing about numbers.
    @supports(
        "fuse_wgrad_accumulation", "delay_wgrad_compute", "get_rng_state_tracker",
        "rng_tracker_name", "init_method", "bias", "return_bias", "params_dtype", "parameters_split", "device", "name", "tp_group",
        "tp_size", "sequence_parallel", "parallel_mode", "ub_name", "save_original_input",
    )  # fmt: skip
    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group=None, tp_size: int = 1,
        get_rng_state_tracker=None, rng_tracker_name: Optional[str] = None, init_method=None,
        bias: bool = True, return_bias: bool = False, params_dtype: Optional[torch.dtype] = None,
        parallel_mode: Optional[str] = None, parameters_split=None, device=None,
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_name: Optional[str] = None,
        delay_wgrad_compute: bool = False, symmetric_ar_type: Optional[str] = None,
        save_original_input: bool = False, name: Optional[str] = None,
    ):  # fmt: skip
        _no_fusion_of_parts("Linear", fuse_wgrad_accumulation, parameters_split)
        workers = size_of(tp_size, tp_group)
        sizes = {"in_features": in_features, "out_features": out_features}
        split = _split_of("Linear", parameters_split, parallel_mode, workers)
        self.begins(Initial((("", init_method),), get_rng_state_tracker, rng_tracker_name), split)
        super().__init__(
            **part("Linear", parallel_mode, sizes, workers), bias=bias, device=place(device), dtype=params_dtype,
            recipe="high_precision", path=name or "linear",
        )  # fmt: skip
        self.made(name, return_bias, fuse_wgrad_accumulation)
        self.save_original_input = save_original_input
        self.postpones(delay_wgrad_compute)
        self.splits({0: parallel_mode}, tp_size, tp_group, sequence_parallel)

    # The arguments are TransformerEngine's.
    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: Optional[bool] = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        refuse("Linear.forward", "fp8_output", fp8_output, False)
        refuse("Linear.forward", "fp8_grad", fp8_grad, False)
        y = self._follow(is_first_microbatch)._linear(inp)
        return (y, self._bias(inp)) if self.return_bias else y


class Normed(Begins):
    """A module that begins with a norm, whose weight may be centred on zero."""

    zero_centered_gamma: bool
    check: Callable[[Tensor], None]
    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: Optional[Tensor]
    normalization: str
    eps: float

    def reset_layer_norm_parameters(self) -> None:
        """Begins the parameters of the norm again, as ``reset_parameters`` does with all."""
        norm_alone_is_deprecated(self, "reset_layer_norm_parameters")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not None and name.startswith("layer_norm_"):
                    self._initial.begin(name, parameter)

    def normalized(self, x: Tensor) -> Tensor:
        if not self.zero_centered_gamma and amp_dtype(x) is None:
            return super().normalized(x)  # type: ignore[misc]
        self.check(x)
        centre = 1.0 if self.zero_centered_gamma else 0.0
        return wide_norm(
            x, self.layer_norm_weight, self.layer_norm_bias, self.normalization, self.eps, centre
        )


def norm_alone_is_deprecated(module: torch.nn.Module, name: str) -> None:
    """Says of a method what to call instead."""
    warnings.warn(
        f"te.{type(module).__name__}.{name} is deprecated: use reset_parameters",
        DeprecationWarning,
        stacklevel=3,
    )


def amp_dtype(x: Tensor) -> Optional[torch.dtype]:
    """The type that ``torch.autocast`` asks for on the tensor's device, if it is on."""
    kind = x.device.type
    on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def wide_norm(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], normalization: str, eps: float, centre: float
) -> Tensor:
    """A norm with ``centre + weight``, which types of 16 bits would round: it is computed in 32.

    In ``torch.autocast`` it takes and gives the type of that, where torch's norms give float32.
    """
    amp = amp_dtype(x)
    if amp is not None:
        with torch.autocast(x.device.type, enabled=False):
            return wide_norm(x.to(amp), weight, bias, normalization, eps, centre)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = centre + weight.to(wide)
    if normalization == "RMSNorm":
        return functional.rms_norm(x.to(wide).contiguous(), weight.shape, scale, eps).to(x.dtype)
    shift = None if bias is None else bias.to(wide)
    return functional.layer_norm(x.to(wide), weight.shape, scale, shift, eps).to(x.dtype)


class LayerNormLinear(OneLinear, Normed, nvfp4.torch.LayerNormLinear):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    @supports(
        "eps", "fuse_wgrad_accumulation", "delay_wgrad_compute", "get_rng_state_tracker",
        "init_method", "bias",
        "normalization", "return_bias", "params_dtype", "return_layernorm_output",
        "parameters_split", "zero_centered_gamma", "device", "name", "tp_group", "tp_size",
        "sequence_parallel", "parallel_mode", "return_layernorm_output_gathered", "ub_name",
    )  # fmt: skip
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5,
        sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False, tp_group=None,
        tp_size: int = 1, get_rng_state_tracker=None, init_method=None, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False,
        params_dtype: Optional[torch.dtype] = None, parallel_mode: Optional[str] = None,
        return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False,
        parameters_split=None, zero_centered_gamma: bool = False, device=None,
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False, ub_bulk_dgrad: bool = False, ub_name: Optional[str] = None,
        delay_wgrad_compute: bool = False, symmetric_ar_type: Optional[str] = None,
        name: Optional[str] = None,
    ):  # fmt: skip
        _no_fusion_of_parts("LayerNormLinear", fuse_wgrad_accumulation, parameters_split)
        initial = Initial((("", init_method),), get_rng_state_tracker, None, zero_centered_gamma)
        workers = size_of(tp_size, tp_group)
        sizes = {"in_features": in_features, "out_features": out_features}
        self.begins(
            initial, _split_of("LayerNormLinear", parameters_split, parallel_mode, workers)
        )
        super().__init__(
            **part("LayerNormLinear", parallel_mode, sizes, workers), eps=eps, bias=bias, normalization=normalization,
            device=place(device), dtype=params_dtype, recipe="high_precision",
            path=name or "layernorm_linear",
        )  # fmt: skip
        self.return_layernorm_output, self.zero_centered_gamma = (
            return_layernorm_output,
            zero_centered_gamma,
        )
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.made(name, return_bias, fuse_wgrad_accumulation)
        self.postpones(delay_wgrad_compute)
        self.splits({0: parallel_mode}, tp_size, tp_group, sequence_parallel)

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: Optional[bool] = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        refuse("LayerNormLinear.forward", "fp8_output", fp8_output, False)
        refuse("LayerNormLinear.forward", "fp8_grad", fp8_grad, False)
        here = self._follow(is_first_microbatch)
        norm = here.normalized(inp)
        outputs: Tuple[Any, ...] = (here._linear(norm),)
        if self.return_bias:
            outputs += (self._bias(inp),)
        if self.return_layernorm_output:
            outputs += (all_tokens(self, norm, self.return_layernorm_output_gathered),)
        return outputs if len(outputs) > 1 else outputs[0]

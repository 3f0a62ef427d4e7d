"""``LayerNormMLP`` and ``GroupedLinear`` under TransformerEngine's names."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
import torch.utils.checkpoint
from torch import Tensor

import nvfp4.torch
from nvfp4.torch._activations import named
from nvfp4.torch._kept import captured

from ._machine import place
from ._initial import Begins, Initial
from ._left_out import left_out
from ._linear import Normed
from ._modules import Follows
from ._parallel import Shards, all_tokens, divided, marked, one_worker, size_of
from ._signature import supports


class LayerNormMLP(Shards, Normed, Follows, nvfp4.torch.LayerNormMLP):
    """``transformer_engine.pytorch.LayerNormMLP``."""

    onnx_forward = left_out("onnx_forward")

    # What is listed and not used below says nothing with one worker, or nothing about numbers.
    @supports(
        "eps", "return_bias", "get_rng_state_tracker", "init_method", "bias", "normalization",
        "activation", "activation_params", "output_layer_init_method", "fuse_wgrad_accumulation",
        "delay_wgrad_compute",
        "params_dtype", "return_layernorm_output", "zero_centered_gamma", "device", "name",
        "checkpoint", "tp_group", "tp_size", "sequence_parallel",
        "return_layernorm_output_gathered", "seq_length", "micro_batch_size", "set_parallel_mode",
    )  # fmt: skip
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5,
        sequence_parallel: bool = False, return_bias: bool = False, get_rng_state_tracker=None,
        tp_group=None, tp_size: int = 1, init_method=None, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", activation_params=None,
        output_layer_init_method=None, fuse_wgrad_accumulation: bool = False,
        params_dtype: Optional[torch.dtype] = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None, set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False, device=None, ub_overlap_ag: bool = False,
        name: Optional[str] = None, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, delay_wgrad_compute: bool = False,
        symmetric_ar_type: Optional[str] = None, checkpoint: bool = False,
    ):  # fmt: skip
        workers = size_of(tp_size, tp_group) if set_parallel_mode else 1
        wide = divided("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size, workers)
        methods = (("fc1", init_method), ("fc2", output_layer_init_method))
        self.begins(Initial(methods, get_rng_state_tracker, None, zero_centered_gamma))
        super().__init__(
            hidden_size, wide, eps=eps, bias=bias, normalization=normalization,
            activation=activation, device=place(device), dtype=params_dtype, recipe="high_precision",
            path=name or "layernorm_mlp",
        )  # fmt: skip
        self.activation = named(activation, activation_params)
        self.return_layernorm_output, self.zero_centered_gamma = (
            return_layernorm_output,
            zero_centered_gamma,
        )
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self.made(name, return_bias, fuse_wgrad_accumulation)
        self.postpones(delay_wgrad_compute)
        modes = {0: "column", 1: "row"} if set_parallel_mode else {}
        self.splits(modes, tp_size, tp_group, sequence_parallel)  # type: ignore[arg-type]

    def forward(self, inp: Tensor, is_first_microbatch: Optional[bool] = None) -> Any:  # type: ignore[override]
        here = self._follow(is_first_microbatch)
        if self.checkpoint and torch.is_grad_enabled():
            # What is computed again is computed by the module as this call has it. A capture cannot
            # look at the state of random numbers.
            y, norm = torch.utils.checkpoint.checkpoint(
                here._mlp, inp, use_reentrant=False, preserve_rng_state=not captured(inp)
            )
        else:
            y, norm = here._mlp(inp)
        outputs: Tuple[Any, ...] = (y,)
        if self.return_bias:
            outputs += (None if self.fc2_bias is None else self.fc2_bias.to(inp.dtype),)
        if self.return_layernorm_output:
            outputs += (all_tokens(self, norm, self.return_layernorm_output_gathered),)
        return outputs if len(outputs) > 1 else outputs[0]

    def _mlp(self, inp: Tensor) -> Tuple[Tensor, Tensor]:
        norm = self.normalized(inp)
        x = self.activation(self.product(norm, self.fc1_weight, self.fc1_bias, 0))
        return self.product(
            x, self.fc2_weight, None if self.return_bias else self.fc2_bias, 1
        ), norm


class _Into(torch.autograd.Function):
    """A tensor in the memory of a buffer."""

    @staticmethod
    def forward(ctx, y, buffer):
        return buffer.detach().copy_(y.reshape(buffer.shape)).view(y.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _GradientInto(torch.autograd.Function):
    """A tensor whose gradient goes into the memory of a buffer."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.buffer.detach().copy_(dx.reshape(ctx.buffer.shape)).view(dx.shape), None


class GroupedLinear(Begins, Follows, nvfp4.torch.GroupedLinear):
    """``transformer_engine.pytorch.GroupedLinear``."""

    return_bias = False
    make_grouped_weights = left_out("make_grouped_weights")

    @supports(
        "fuse_wgrad_accumulation", "delay_wgrad_compute", "get_rng_state_tracker",
        "rng_tracker_name", "init_method", "bias", "return_bias", "params_dtype", "device", "name", "tp_group", "tp_size",
        "sequence_parallel", "parallel_mode", "ub_name", "save_original_input",
    )  # fmt: skip
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group=None, tp_size: int = 1,
        get_rng_state_tracker=None, rng_tracker_name: Optional[str] = None, init_method=None,
        bias: bool = True, return_bias: bool = False, params_dtype: Optional[torch.dtype] = None,
        parallel_mode: Optional[str] = None, device=None, ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False, ub_name: Optional[str] = None,
        delay_wgrad_compute: bool = False, save_original_input: bool = False,
        single_grouped_weight: bool = False, single_grouped_bias: bool = False,
        name: Optional[str] = None, use_grouped_tensor: Optional[bool] = None,
    ):  # fmt: skip
        one_worker("GroupedLinear", tp_size, tp_group)
        self.begins(Initial((("", init_method),), get_rng_state_tracker, rng_tracker_name))
        super().__init__(
            num_gemms, in_features, out_features, bias=bias, device=place(device), dtype=params_dtype,
            recipe="high_precision", path=name or "grouped_linear",
        )  # fmt: skip
        self.made(name, return_bias, fuse_wgrad_accumulation)
        self.save_original_input = save_original_input
        self.postpones(delay_wgrad_compute)
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel
        self.set_tensor_parallel_attributes()

    def set_tensor_parallel_attributes(self, defer_init: bool = False) -> None:
        """Notes on weights and biases what Megatron reads: how they would be split."""
        for name, parameter in self._parameters.items() if not defer_init else ():
            if parameter is None or (name.startswith("bias") and self.parallel_mode is None):
                continue
            if name.startswith("bias") and self.parallel_mode == "row":
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            else:
                marked(parameter, self.parallel_mode)

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        m_splits: List[int],
        is_first_microbatch: Optional[bool] = None,
        out=None,
        dgrad_out=None,
    ) -> Any:
        rows = inp.shape[:-1].numel()
        for name, buffer, features in (
            ("out", out, self.out_features),
            ("dgrad_out", dgrad_out, self.in_features),
        ):
            if buffer is not None and tuple(buffer.shape) != (rows, features):
                raise ValueError(
                    f"{self.path}:{name}: expected a buffer of ({rows}, {features}) for these "
                    f"tokens, got {tuple(buffer.shape)}"
                )
        inp = inp if dgrad_out is None else _GradientInto.apply(inp, dgrad_out)
        y = super(GroupedLinear, self._follow(is_first_microbatch)).forward(inp, m_splits)
        y = y if out is None else _Into.apply(y, out)
        if not self.return_bias:
            return y
        biases = [getattr(self, f"bias{expert}") for expert in range(self.num_gemms)]
        return y, [inp.new_empty(0) if bias is None else bias.to(inp.dtype) for bias in biases]

    def _bias(self, expert: int) -> Optional[Tensor]:
        return None if self.return_bias else super()._bias(expert)

    def formats_by_codes(self, weights: List[Tensor]) -> Any:
        # What has its own products, or looks at operands, sees tokens as they are.
        if self._foreign is not None or self._calibrated is not None or self._store is not None:
            return None
        return super().formats_by_codes(weights)

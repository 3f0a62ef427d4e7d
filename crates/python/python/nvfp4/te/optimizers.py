"""``transformer_engine.pytorch.optimizers``: Adam and SGD with its arguments, in operations of torch.

State is float32, or what is asked for. A parameter that is quantized takes its new values, which
are quantized again.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.optim.optimizer import required  # type: ignore[attr-defined]

from ._float8 import Float8Quantizer
from ._signature import refuse

__all__ = ["FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_applier"]

_WIDE = (torch.float32, torch.float16, torch.bfloat16)


class _Optimizer(torch.optim.Optimizer):
    set_grad_none: Optional[bool] = None

    def _deprecated(self, set_grad_none: Optional[bool]) -> None:
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated: pass set_to_none to zero_grad",
                DeprecationWarning,
                stacklevel=3,
            )

    def zero_grad(self, set_to_none: Optional[bool] = None) -> None:  # type: ignore[override]
        """Clears the gradients; they become None unless something else is said."""
        if self.set_grad_none is not None and set_to_none not in (None, self.set_grad_none):
            raise ValueError("zero_grad: set_to_none is not what the optimizer was made with")
        none = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(True if none is None else none)
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(self, "use_decoupled_grad", False):
                    parameter.decoupled_grad = None

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state, in the types that it was saved in."""
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            for key, parameter in zip(saved["params"], group["params"]):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor):
                        self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _moments(self, parameter: Tensor, names: Dict[str, torch.dtype]) -> Dict[str, Any]:
        """The state of a parameter, which begins with zeros."""
        state = self.state[parameter]
        for name, dtype in names.items():
            if name not in state:
                state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return state


class FusedAdam(_Optimizer):
    """Adam, or AdamW with ``adam_w_mode``. With ``master_weights`` parameters follow a copy in
    ``master_weight_dtype``, which is in the state.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, *,
        bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False,
        master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32, use_decoupled_grad=False, store_param_remainders=False,
        set_grad_none: Optional[bool] = None,
    ):  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        refuse("optimizers.FusedAdam", "capturable", capturable, False)
        refuse("optimizers.FusedAdam", "store_param_remainders", store_param_remainders, False)
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype is torch.uint8:
                raise NotImplementedError(
                    f"te.optimizers.FusedAdam: {name}_dtype in FP8 is not supported here; use bfloat16"
                )
            if dtype not in _WIDE:
                raise RuntimeError(f"FusedAdam only supports fp32/fp16/bf16/fp8 {name}.")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode, self.master_weights = adam_w_mode, master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master_weight_dtype = master_weight_dtype
        self._deprecated(set_grad_none)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step. ``grad_scaler`` belongs to captured steps, which there are none of."""
        refuse("optimizers.FusedAdam.step", "grad_scaler", grad_scaler, None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                name = "decoupled_grad" if self.use_decoupled_grad else "grad"
                grad = getattr(parameter, name, None)
                if grad is None:
                    continue
                if grad.is_sparse:
                    raise RuntimeError("FusedAdam does not support sparse gradients.")
                if not self.master_weights and _forgets(parameter):
                    kind = type(parameter).__name__
                    raise RuntimeError(
                        f"FusedAdam without master_weights does not support {kind} parameters: "
                        "codes forget small changes. Use master_weights=True"
                    )
                self._update(group, parameter, grad.float())
        return loss

    def _update(self, group: Dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self._begun(parameter)
        master = state.get("master_param")
        weight = (_values(parameter) if master is None else master).float()
        beta1, beta2 = group["betas"]
        decay, step = group["weight_decay"], group["step"]
        if decay and not self.adam_w_mode:
            grad = grad.add(weight, alpha=decay)
        exp_avg = state["exp_avg"].float().mul(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq = state["exp_avg_sq"].float().mul(beta2).addcmul_(grad, grad, value=1 - beta2)
        first, second = (
            (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        )
        change = (exp_avg / first).div_((exp_avg_sq / second).sqrt_().add_(group["eps"]))
        if decay and self.adam_w_mode:
            change.add_(weight, alpha=decay)
        weight = weight - group["lr"] * change
        state["exp_avg"].copy_(exp_avg)
        state["exp_avg_sq"].copy_(exp_avg_sq)
        if master is not None:
            master.copy_(weight)
        parameter.copy_(weight)

    @torch.no_grad()
    def _begun(self, parameter: Tensor) -> Dict[str, Any]:
        """The state of a parameter, made if it is not there."""
        state = self._moments(parameter, self.name_to_dtype_map)
        if self.master_weights and "master_param" not in state:
            state["master_param"] = _values(parameter).to(self.master_weight_dtype, copy=True)
        return state

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Begins the state of a parameter again: zeros, and its values as a master."""
        name = "store_param_remainders"
        refuse("optimizers.FusedAdam.initialize_state", name, store_param_remainders, False)
        self.state.pop(param, None)
        self._begun(param)

    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """A state as float32, or as it is kept."""
        state = self.state[param][state_name]
        return state if skip_unscale else state.float()

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Sets a state from float32."""
        self._moments(param, self.name_to_dtype_map)
        if state_name == "master_param" and state_name not in self.state[param]:
            self.state[param][state_name] = unscaled_state.to(self.master_weight_dtype, copy=True)
        else:
            self.state[param][state_name].copy_(unscaled_state)


class FusedSGD(_Optimizer):
    """SGD with momentum; with ``wd_after_momentum`` weights decay after it."""

    def __init__(
        self, params: Iterable[Any], lr: Any = required, momentum: float = 0.0,
        dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
        wd_after_momentum=False, materialize_master_grads=True,
        set_grad_none: Optional[bool] = None,
    ):  # fmt: skip
        for name, value in (
            ("learning rate", lr),
            ("momentum value", momentum),
            ("weight_decay value", weight_decay),
        ):
            if value is not required and value < 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.wd_after_momentum, self.materialize_master_grads = (
            wd_after_momentum,
            materialize_master_grads,
        )
        self._deprecated(set_grad_none)

    def get_momentums(self, params: Sequence[Tensor]) -> Tuple[List[Tensor], bool]:
        """The momenta of parameters, and whether they begin now."""
        first = any("momentum_buffer" not in self.state[p] for p in params)
        return [
            self._moments(p, {"momentum_buffer": torch.float32})["momentum_buffer"] for p in params
        ], first

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad.float())
        return loss

    def _update(self, group: Dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        weight, decay, momentum = (
            _values(parameter).float(),
            group["weight_decay"],
            group["momentum"],
        )
        if decay and not self.wd_after_momentum:
            grad = grad.add(weight, alpha=decay)
        if momentum:
            (moved,), first = self.get_momentums([parameter])
            moved.mul_(momentum).add_(grad, alpha=1.0 if first else 1 - group["dampening"])
            grad = grad.add(moved, alpha=momentum) if group["nesterov"] else moved
        if decay and self.wd_after_momentum:
            grad = grad.add(weight, alpha=decay)
        parameter.copy_((weight - group["lr"] * grad).to(parameter.dtype))


def _forgets(parameter: Tensor) -> bool:
    """Whether a parameter is codes alone, with scales of its own: TransformerEngine changes no such
    codes but those of delayed scaling.
    """
    quantizer = getattr(parameter, "_quantizer", None)
    return quantizer is not None and not isinstance(quantizer, Float8Quantizer)


def _values(parameter: Tensor) -> Tensor:
    """The values of a parameter, which may be quantized."""
    return parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter.detach()


class MultiTensorApply:
    """Calls a function of the extension with lists of tensors."""

    available, warned = True, False

    def __init__(self, chunk_size: int):
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable, noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any
    ) -> Any:
        for number, tensors in enumerate(tensor_lists):
            if len(tensors) != len(tensor_lists[0]):
                raise RuntimeError(
                    f"multi_tensor_applier: list {number} is not as long as the first"
                )
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)

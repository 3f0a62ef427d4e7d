"""Norms under TransformerEngine's names."""

from __future__ import annotations

import warnings
from typing import Any, Iterable, Optional, Union

import torch
from torch import Tensor

from nvfp4.torch._norm import norm

from ._initial import made_real
from ._linear import amp_dtype, norm_alone_is_deprecated, wide_norm
from ._machine import place
from ._modules import TheirState
from ._signature import refuse


class _Norm(TheirState):
    """What both norms have: a weight, which may be centred on zero."""

    normalization: str
    bias: Optional[torch.nn.Parameter]

    def __init__(
        self, normalized_shape: Union[Iterable[int], int, None] = None, eps: float = 1e-5,
        sequence_parallel: Optional[bool] = None, params_dtype: Optional[torch.dtype] = None,
        zero_centered_gamma: bool = False, hidden_size: Optional[int] = None, **kwargs: Any,
    ):  # fmt: skip
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError(
                f"te.{self.normalization}: pass normalized_shape, and not hidden_size, its older name"
            )
        if hidden_size is not None:
            warnings.warn(
                "hidden_size is the older name of normalized_shape",
                DeprecationWarning,
                stacklevel=3,
            )
            normalized_shape = hidden_size
        if params_dtype is not None and "dtype" in kwargs:
            raise RuntimeError(
                f"te.{self.normalization}: pass dtype, and not params_dtype, its older name"
            )
        device, dtype = place(kwargs.pop("device", None)), kwargs.pop("dtype", params_dtype)
        if kwargs:
            raise NotImplementedError(
                f"te.{self.normalization}: the argument {next(iter(kwargs))} is not supported here; leave it out"
            )
        assert normalized_shape is not None
        shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps, self.zero_centered_gamma, self.sequence_parallel = (
            eps,
            zero_centered_gamma,
            sequence_parallel,
        )
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias = (
            torch.nn.Parameter(torch.empty_like(self.weight))
            if self.normalization == "LayerNorm"
            else None
        )
        self.register_parameter("bias", bias)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self, defer_init: Optional[bool] = None) -> None:
        """Begins the parameters again. Those on the meta device become real, on torch's default
        device, unless it is deferred.
        """
        if defer_init:
            return
        made_real(self)
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        if self.sequence_parallel is not None:  # Megatron reads it there
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        other = input.dtype != self.weight.dtype or amp_dtype(input) is not None
        if self.zero_centered_gamma or other:
            centre = 1.0 if self.zero_centered_gamma else 0.0
            return wide_norm(input, self.weight, self.bias, self.normalization, self.eps, centre)
        return norm(input, self.weight, self.bias, self.normalization, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _margin(name: str) -> property:
    """How many multiprocessors a norm leaves alone: none."""

    def changed(self: Any, value: int) -> None:
        refuse(f"{self.normalization}.{name}", "value", value, 0)

    return property(lambda self: 0, changed)


class LayerNorm(_Norm):
    """``transformer_engine.pytorch.LayerNorm``."""

    normalization = "LayerNorm"
    fwd_ln_sm_margin = _margin("fwd_ln_sm_margin")
    bwd_ln_sm_margin = _margin("bwd_ln_sm_margin")
    inf_ln_sm_margin = _margin("inf_ln_sm_margin")

    def reset_layer_norm_parameters(self) -> None:
        """The old name of :meth:`reset_parameters`."""
        norm_alone_is_deprecated(self, "reset_layer_norm_parameters")
        self.reset_parameters()


class RMSNorm(_Norm):
    """``transformer_engine.pytorch.RMSNorm``."""

    normalization = "RMSNorm"
    fwd_rmsnorm_sm_margin = _margin("fwd_rmsnorm_sm_margin")
    bwd_rmsnorm_sm_margin = _margin("bwd_rmsnorm_sm_margin")
    inf_rmsnorm_sm_margin = _margin("inf_rmsnorm_sm_margin")

    def reset_rms_norm_parameters(self) -> None:
        """The old name of :meth:`reset_parameters`."""
        norm_alone_is_deprecated(self, "reset_rms_norm_parameters")
        self.reset_parameters()


class L2Normalization(torch.nn.Module):
    """Divides by the length of the last dimension, and has no weight."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(input.dtype)

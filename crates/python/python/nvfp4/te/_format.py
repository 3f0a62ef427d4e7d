"""TransformerEngine's names for formats and for settings of products, and what they are called
here.
"""

from __future__ import annotations

import enum
import os
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple, Tuple


class _Largest(NamedTuple):
    """The largest numbers of the forward and of the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """The small formats of a recipe; ``HYBRID`` is E4M3 forward and E5M2 backward."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


class DType(enum.IntEnum):
    """The types that quantizers are asked for, with TransformerEngine's numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: Any) -> "DType":
        """The type with this number."""
        return cls(int(dtype))


@dataclass(frozen=True)
class MMParams:
    """How products of FP8 are added on a GPU: ``split`` or ``fast`` in this package's recipes."""

    use_split_accumulator: bool = True

    @property
    def accumulator(self) -> str:
        """The same in a recipe's words."""
        return "split" if self.use_split_accumulator else "fast"


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    @property
    def words(self) -> Tuple[str, ...]:
        """What it says about scales of FP8, in the words of specs."""
        epsilon = (f"epsilon={self.amax_epsilon!r}",) if self.amax_epsilon else ()
        return ("pow2-scale" if self.power_2_scale else "any-scale", *epsilon)


def spec_of(name: str, *words: str) -> str:
    """A spec of these words; empty ones are left out."""
    given = [word for word in words if word]
    return f"{name}({', '.join(given)})" if given else name


def four_over_six(errors: str, bound: int) -> str:
    """The rule 4over6 in the words of specs. TransformerEngine has no setting for how errors are
    computed: it asks the environment at each quantization.
    """
    fast = os.getenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") == "1"
    return f"4over6-{errors.lower()}-{'fast' if fast else 'strict'}-{bound}"


def notice_fast_math() -> None:
    """Says that ``NVTE_USE_FAST_MATH`` changes nothing. TransformerEngine reads it at each
    quantization: its kernels for bfloat16 and blocks of 1×16 then give other codes.
    """
    if os.getenv("NVTE_USE_FAST_MATH", "0") == "1":
        warnings.warn(
            "NVTE_USE_FAST_MATH=1 changes nothing here: codes are TransformerEngine's without it. "
            "With it, its kernels for bfloat16 round blocks of 1x16 otherwise; unset it"
        )


def fp8_code(format: Format, direction: str) -> str:
    """The FP8 code of a pass, "forward" or "backward"."""
    if format is Format.HYBRID:
        return "e4m3" if direction == "forward" else "e5m2"
    if format is Format.E4M3:
        return "e4m3"
    raise ValueError(f"fp8_format: expected Format.HYBRID or Format.E4M3, got {format}")


def fp8_dtype(format: Format, forward: bool) -> DType:
    """The FP8 type of a pass; E5M2 in the backward pass of every format but E4M3."""
    e4m3 = format is Format.E4M3 or (format is Format.HYBRID and forward)
    return DType.kFloat8E4M3 if e4m3 else DType.kFloat8E5M2


def fp8_code_of(dtype: Any) -> str:
    """The code of a quantizer's type."""
    codes = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}
    try:
        return codes[DType.cast(dtype)]
    except (KeyError, ValueError, TypeError):
        raise ValueError(
            f"fp8_dtype: expected DType.kFloat8E4M3 or DType.kFloat8E5M2, got {dtype!r}"
        ) from None


def delayed_spec(settings: Any, direction: str) -> str:
    """The spec of a tensor with delayed scaling; a recipe and a request have the same settings."""
    algorithm = settings.amax_compute_algo
    if callable(algorithm):  # what follows from it is made beside the spec
        algorithm = "max"
    if algorithm not in ("max", "most_recent"):
        raise ValueError(
            f"amax_compute_algo: expected 'max', 'most_recent' or a function, got {algorithm!r}"
        )
    scales = settings.scaling_factor_compute_algo
    if scales is not None and not callable(scales):
        raise ValueError(
            f"scaling_factor_compute_algo: expected a function or None, got {scales!r}"
        )
    return spec_of(
        "fp8-delayed",
        fp8_code(settings.fp8_format, direction),
        f"history={settings.amax_history_len}",
        f"margin={settings.margin}",
        algorithm.replace("_", "-"),
        "reduced" if settings.reduce_amax else "local",
    )

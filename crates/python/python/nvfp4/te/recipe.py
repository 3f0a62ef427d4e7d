"""Recipes under TransformerEngine's names: ``transformer_engine.common.recipe``.

>>> from nvfp4.te import recipe
>>> recipe.DelayedScaling(amax_history_len=16).recipe().spec("fc", "grad_output")
'fp8-delayed(e5m2, history=16)'

Fields have TransformerEngine's names, order and defaults. Environment variables are read when a
recipe is made. A recipe may be changed afterwards, as there: the next ``autocast`` follows it.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Tuple, Union

import nvfp4

from ._attention_recipe import Variables, attention_specs
from ._format import (
    Format, MMParams, QParams, delayed_spec, four_over_six, fp8_code, notice_fast_math, spec_of,
)  # fmt: skip
from ._products import is_foreign
from ._roles import QuantizerRole, consumer, spec_of_answer

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]

_Mapped = nvfp4.Recipe  # in a class with a method of the module's name
_SCOPES = ("none", "weights", "activations", "all")
_LINEAR = ("input", "weight", "grad_output")
_BACKWARD = (None, "high_precision", "dequantized")


def _variable(name: str, default: Optional[str] = None) -> Any:
    """A field whose default is in the environment."""
    return field(default_factory=lambda: os.getenv(name, default))


def _switch(name: str) -> Any:
    """A field that a variable in the environment switches on."""
    return field(default_factory=lambda: os.getenv(name, "0") == "1")


class Recipe:
    """What all recipes have: questions about their kind, and :meth:`recipe`."""

    backward_override: Optional[str] = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    # What the environment said about attention when it was made.
    _attention: Optional[Variables] = None

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether it is NVFP4."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether it is MXFP8."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether it is delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether it is FP8 with scales per tensor that are made from the tensor itself."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether it is FP8 with one scale per tensor."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether it is FP8 with scales for blocks of 128."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether a factory gives the quantizers."""
        return issubclass(cls, CustomRecipe)

    def recipe(self) -> _Mapped:
        """The recipe of this package that it stands for."""
        raise NotImplementedError(
            f"{type(self).__name__} is no recipe by itself: use a class that derives from Recipe"
        )

    def _begin(self) -> None:
        self._attention = Variables.read()
        self._check()

    def _check(self) -> None:
        """Refuses what no recipe of TransformerEngine takes, and sets what it sets."""
        _one_of("backward_override", self.backward_override, _BACKWARD)
        if self.fp8_mha and not self.fp8_dpa:
            warnings.warn(
                "fp8_mha: attention that hands over FP8 computes in it: fp8_dpa=True is taken",
                stacklevel=4,
            )
            self.fp8_dpa = True
        named = self._attention is not None and not self.custom()
        if self.fp8_dpa and (self.float8_block_scaling() or (self.nvfp4() and not named)):
            raise ValueError(
                f"fp8_dpa: {type(self).__name__} has no format that attention reads; a CustomRecipe "
                "gives its tensors FP8 or MXFP8, as with nvfp4_linear_fp8_dpa_factory, and so does "
                "NVTE_DPA_FP8_RECIPE for NVFP4BlockScaling"
            )
        if self.fp8_dpa and named:
            self._attention.check()  # type: ignore[union-attr]


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


@functools.lru_cache(maxsize=64)
def _mapped(
    name: str,
    preset: str,
    input: str,
    weight: str,
    grad_output: str,
    backward: Optional[str],
    sums: Optional[tuple] = None,
    attention: Union[bool, Tuple[Tuple[str, str], ...]] = False,
) -> nvfp4.Recipe:
    """The preset if it has these specs, or else rules that give them. Attention stays in high
    precision, or its tensors have the specs of inputs and of gradients, or specs of their own.
    """
    specs = [
        nvfp4.Quantizer(spec=text, directions="both").spec for text in (input, weight, grad_output)
    ]
    recipe = nvfp4.Recipe(preset)
    of_its_own = isinstance(attention, tuple)
    if of_its_own or specs != [recipe.spec("any", slot) for slot in _LINEAR]:
        rule = '[[rule]]\nmodule = "attention"\n'
        plain = "" if attention else f'{rule}spec = "high-precision"\n'
        for slot, spec in attention if isinstance(attention, tuple) else ():
            plain += f'{rule}slot = "{slot}"\nspec = "{spec}"\n'
        recipe = nvfp4.Recipe.from_toml(
            f'name = "{name}"\n{plain}'
            f'[[rule]]\nslot = "weight"\nspec = "{specs[1]}"\n[[rule]]\npass = "backward"\nspec = "{specs[2]}"\n'
            f'[default]\nspec = "{specs[0]}"\n'
        )
    elif attention:
        recipe = nvfp4.Recipe(f"{preset}+attention")
    if sums is not None:
        fprop, dgrad, wgrad = sums
        recipe = recipe.with_accumulators(fprop=fprop, dgrad=dgrad, wgrad=wgrad)
    return recipe.with_backward((backward or "none").replace("_", "-"))


@dataclass
class DelayedScaling(Recipe):
    """FP8 with scales from the amaxes of earlier steps.

    ``amax_compute_algo`` is "max", "most_recent" or a function of the history, [steps, 1], that
    gives the amax; ``scaling_factor_compute_algo(amax, scale, fp8_max, recipe)`` gives the scale.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _variable("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self) -> None:
        self._begin()
        if self.backward_override is not None:
            raise ValueError(
                f"backward_override: delayed scaling takes None, got {self.backward_override!r} "
                "(its default is the variable NVTE_BACKWARD_OVERRIDE)"
            )
        delayed_spec(self, "forward")

    def recipe(self) -> nvfp4.Recipe:
        forward, backward = (delayed_spec(self, direction) for direction in ("forward", "backward"))
        name, attention = type(self).__name__, attention_specs(self)
        return _mapped(
            name, "delayed_scaling", forward, forward, backward, None, attention=attention
        )


@dataclass
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor itself.

    ``use_power_2_scales`` holds for all tensors; as in TransformerEngine, what is assigned to
    ``fp8_quant_fwd_inp`` and its like changes nothing.
    """

    use_power_2_scales: bool = _switch("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _variable("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self) -> None:
        self._begin()
        fp8_code(self.fp8_format, "forward")
        scales = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = scales

    def recipe(self) -> nvfp4.Recipe:
        words = QParams(power_2_scale=self.use_power_2_scales).words
        forward, backward = (
            spec_of("fp8", fp8_code(self.fp8_format, d), *words) for d in ("forward", "backward")
        )
        name = type(self).__name__
        return _mapped(
            name, "current_scaling", forward, forward, backward, self.backward_override,
            _sums(self), attention_specs(self),
        )  # fmt: skip


def _sums(recipe: Any) -> tuple:
    """How a recipe adds the products of fprop, dgrad and wgrad."""
    return tuple(
        params.accumulator
        for params in (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    )


@dataclass
class MXFP8BlockScaling(Recipe):
    """MXFP8: a power of two for every 32 values, or for squares of 32×32 of weights.

    ``margin`` changes nothing, as in TransformerEngine.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _variable("NVTE_BACKWARD_OVERRIDE")
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._begin()
        fp8_code(self.fp8_format, "forward")

    def recipe(self) -> nvfp4.Recipe:
        forward, backward = (
            fp8_code(self.fp8_format, direction) for direction in ("forward", "backward")
        )
        weight = spec_of("mxfp8", forward, "32x32" if self.enable_2d_quantization else "")
        name, input, grad_output = (
            type(self).__name__,
            spec_of("mxfp8", forward),
            spec_of("mxfp8", backward),
        )
        return _mapped(
            name, "mxfp8", input, weight, grad_output, self.backward_override,
            attention=attention_specs(self),
        )  # fmt: skip


@dataclass
class Float8BlockScaling(Recipe):
    """FP8 with a scale for 128 values, or for squares of 128×128.

    ``use_f32_scales`` sets ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and
    ``fp8_quant_bwd_grad``, which a script may replace afterwards.
    """

    use_f32_scales: bool = _switch("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _variable("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self) -> None:
        self._begin()
        fp8_code(self.fp8_format, "forward")
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        for name, dim in zip(("x", "w", "grad"), dims):
            _one_of(f"{name}_block_scaling_dim", dim, (1, 2))
        if dims.count(2) > 1:
            raise ValueError(
                "of x_block_scaling_dim, w_block_scaling_dim and grad_block_scaling_dim only one may be 2"
            )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(
                    f"{name}: FP8 in blocks needs MMParams(use_split_accumulator=True)"
                )
        scales = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = scales

    def recipe(self) -> nvfp4.Recipe:
        def spec(params: QParams, dim: int, direction: str) -> str:
            return spec_of(
                "fp8-block",
                fp8_code(self.fp8_format, direction),
                ("1x128", "128x128")[dim - 1],
                *params.words,
            )

        input = spec(self.fp8_quant_fwd_inp, self.x_block_scaling_dim, "forward")
        weight = spec(self.fp8_quant_fwd_weight, self.w_block_scaling_dim, "forward")
        grad_output = spec(self.fp8_quant_bwd_grad, self.grad_block_scaling_dim, "backward")
        name, preset = type(self).__name__, "float8_block_scaling"
        return _mapped(
            name, preset, input, weight, grad_output, self.backward_override, _sums(self)
        )


@dataclass
class NVFP4BlockScaling(Recipe):
    """NVFP4 for training.

    The switches set ``fp4_quant_fwd_inp``, ``fp4_quant_fwd_weight`` and ``fp4_quant_bwd_grad``,
    which a script may replace afterwards. Combinations that TransformerEngine's kernels lack, such
    as 4over6 with the Hadamard transform, are computed.
    """

    disable_rht: bool = _switch("NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = _switch("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = _switch("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = _switch("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = _variable("NVTE_NVFP4_4OVER6", "none")
    nvfp4_4over6_e4m3_use_256: str = _variable("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
    nvfp4_4over6_err_mode: str = field(
        default_factory=lambda: os.getenv("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()
    )
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _variable("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self) -> None:
        self._begin()
        _one_of("fp4_format", self.fp4_format, (Format.E2M1,))
        _one_of("fp8_format", self.fp8_format, (Format.E4M3,))
        _one_of("nvfp4_4over6", self.nvfp4_4over6, _SCOPES)
        _one_of("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256, _SCOPES)
        _one_of("nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ("MAE", "MSE"))
        rotated, stochastic = not self.disable_rht, not self.disable_stochastic_rounding
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rotated)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=rotated, stochastic_rounding=stochastic
        )

    def recipe(self) -> nvfp4.Recipe:
        notice_fast_math()

        def spec(params: QParams, *more: str) -> str:
            return spec_of(
                "nvfp4",
                "16x16" if params.fp4_2d_quantization else "",
                "hadamard" if params.random_hadamard_transform else "",
                "stochastic" if params.stochastic_rounding else "",
                *more,
            )

        row_scaled = "row-scaled" if self.row_scaled_activation else ""
        input = spec(self.fp4_quant_fwd_inp, row_scaled, self._four_over_six("activations"))
        weight = spec(self.fp4_quant_fwd_weight, self._four_over_six("weights"))
        grad_output = spec(self.fp4_quant_bwd_grad)
        return _mapped(
            type(self).__name__, "nvfp4", input, weight, grad_output, self.backward_override,
            attention=attention_specs(self),
        )  # fmt: skip

    def _four_over_six(self, scope: str) -> str:
        if self.nvfp4_4over6 not in (scope, "all"):
            return ""
        bound = 256 if self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else 448
        return four_over_six(self.nvfp4_4over6_err_mode, bound)


_numbers = itertools.count()


@functools.lru_cache(maxsize=64)
def _number(factory: Callable) -> int:
    """The number of a factory: the same for the same one, while it is among the last that were
    used.
    """
    return next(_numbers)


@dataclass
class CustomRecipe(Recipe):
    """A recipe from a factory: ``qfactory(role)`` gives the quantizer of a tensor.

    It may return a quantizer of ``nvfp4.te``, a ``DelayedScalingRequest``, an ``nvfp4.Quantizer``
    or the text of a spec, or a quantizer of a class of one's own, which is then called for every
    tensor. What it raises becomes a ValueError that names the role. Recipes with the
    same factory and the same settings are equal, and a module asks a factory once: to change the
    answers, pass another factory. ``fp8_format`` changes nothing, as in TransformerEngine, and
    neither does ``quantization_alignment`` in modules: they pad by themselves.
    """

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _variable("NVTE_BACKWARD_OVERRIDE")
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        self._begin()
        # Quantizers can be called too, with tensors.
        if not callable(self.qfactory) or hasattr(self.qfactory, "spec"):
            raise TypeError(
                f"qfactory: expected a function of a role that returns a quantizer, got {self.qfactory!r}"
            )
        if self.quantization_alignment <= 0:
            raise ValueError(
                f"quantization_alignment must be positive, got {self.quantization_alignment}"
            )

    @property
    def key(self) -> str:
        """What stands for the factory where recipes are compared."""
        flags = " with fp8_mha" if self.fp8_mha else " with fp8_dpa" if self.fp8_dpa else ""
        try:
            return f"custom recipe {_number(self.qfactory)}{flags}"
        except TypeError:  # it has no hash, so it can only be compared with itself
            return f"custom recipe at {id(self.qfactory)}{flags}"

    def recipe(self) -> nvfp4.Recipe:
        factory, attention, handed_over = self.qfactory, self.fp8_dpa, self.fp8_mha
        # What it answered, by path and expert, and then by slot.
        self._answers: dict = {}

        def spec(asked: nvfp4.Role) -> str:
            role = QuantizerRole(*asked.legacy)
            if asked.module == "attention":
                if not attention:
                    return "high-precision"
                role = consumer(asked.slot, role) if handed_over else role
            answer = factory(role)
            self._answers.setdefault((asked.path, asked.expert), {})[asked.slot] = answer
            if is_foreign(answer):
                if asked.module == "attention":
                    raise TypeError(
                        f"the factory returned {type(answer).__name__} for {role}, which brings its own "
                        "product: attention reads FP8 and MXFP8 alone"
                    )
                return "high-precision"
            return spec_of_answer(answer, role, asked.pass_)

        backward = (self.backward_override or "none").replace("_", "-")
        return nvfp4.Recipe.from_function(self.key, spec).with_backward(backward)


def hand_over_of(recipe: Any) -> str:
    """Which tensors attention hands over quantized: "none", its "output", or "both" this and its
    gradients.
    """
    if not isinstance(recipe, Recipe) or not recipe.fp8_dpa:
        return "none"
    given = recipe._attention
    if given is not None and not recipe.custom():
        return "both" if given.both else "output" if given.output else "none"
    if recipe.fp8_mha:
        return "both"
    return "none" if recipe.custom() else "output"


def of(recipe: Any) -> nvfp4.Recipe:
    """The recipe of this package for what ``autocast`` takes: a recipe of either package, or the
    name of a preset.
    """
    if isinstance(recipe, str):
        return nvfp4.Recipe(recipe)
    if isinstance(recipe, nvfp4.Recipe):
        return recipe
    if isinstance(recipe, Recipe):
        recipe._check()  # it may have been changed
        return recipe.recipe()
    raise TypeError(
        f"recipe: expected a recipe of nvfp4.te, an nvfp4.Recipe or the name of a preset, got {type(recipe).__name__}"
    )

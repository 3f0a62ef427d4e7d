"""What a plan says about a linear layer, as plain values that compilers can see through."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import nvfp4


class Format(NamedTuple):
    """How one tensor is quantized: in which spec, in which directions, and as how many arrays."""

    spec: str
    directions: str
    row: int
    column: int
    rounding: str

    @classmethod
    def of(cls, quantizer: nvfp4.Quantizer) -> "Format":
        row, column = nvfp4.layout(quantizer.spec, quantizer.directions, [16, 16], "float32")
        return cls(quantizer.spec, quantizer.directions, len(row), len(column), quantizer.rounding)

    def alone(self, side: str) -> "Format":
        """The same format in one direction."""
        return Format.of(nvfp4.Quantizer(spec=self.spec, directions=side))


class Formats(NamedTuple):
    """How the tensors of a linear layer are quantized."""

    input: Format
    weight: Format
    grad_output: Format
    input_row: Format
    weight_row: Format
    alignment: int

    @property
    def quantizes(self) -> bool:
        """Whether anything is."""
        return any(f.spec != "high-precision" for f in (self.input, self.weight, self.grad_output))


def recipe_of(recipe: Union[str, nvfp4.Recipe]) -> nvfp4.Recipe:
    """A recipe, or a preset by its name."""
    return nvfp4.Recipe(recipe) if isinstance(recipe, str) else recipe


def formats_of(plan: nvfp4.Plan, path: str, expert: Optional[int] = None) -> Formats:
    """What a plan says about the linear layer at a path."""
    for slot in ("input", "weight", "grad_output"):
        spec = plan.spec(path, slot, expert=expert)
        if "fp8-delayed" in spec:
            raise ValueError(
                f"{path}:{slot}: {spec} keeps state between steps, which these modules do not; "
                "use a recipe that scales by the tensor itself, such as 'current_scaling'"
            )
    input, weight, grad_output = (
        Format.of(plan.quantizer(path, slot, expert=expert)) for slot in ("input", "weight", "grad_output")
    )
    alignment = plan.alignment(path) or 1
    return Formats(input, weight, grad_output, input.alone("row"), weight.alone("row"), alignment)


def plan_of(recipe: Union[str, nvfp4.Recipe], modules: list) -> nvfp4.Plan:
    """The plan of these modules."""
    return nvfp4.Plan(recipe_of(recipe), modules)


def linear_formats(recipe: Union[str, nvfp4.Recipe], path: str) -> Formats:
    """The formats of a single linear layer."""
    return formats_of(plan_of(recipe, [(path, "linear")]), path)


"""What a plan says about a linear layer, as plain values that compilers can see through."""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional, Tuple, Union

import torch

import nvfp4


class Format(NamedTuple):
    """How one tensor is quantized: in which spec, in which directions, and as how many arrays.

    ``delayed`` lists what has a scale from earlier steps: ("both",), or "row" and "column" apart.
    ``shared`` says, for each direction, which of its scales depend on several workers' parts of the
    tensor: the "stored" amax of all of it, that of each "line", the amax of the whole "tensor" that
    is not stored, or "nothing".
    """

    spec: str
    directions: str
    row: int
    column: int
    rounding: str
    delayed: Tuple[str, ...]
    shared: Tuple[str, str]

    @classmethod
    def of(cls, quantizer: nvfp4.Quantizer) -> "Format":
        row, column = nvfp4.layout(quantizer.spec, quantizer.directions, [16, 16], "float32")
        delayed = tuple(nvfp4.Delayed.parts(quantizer.spec))
        shared = _shared(quantizer.spec, quantizer.directions)
        return cls(quantizer.spec, quantizer.directions, len(row), len(column), quantizer.rounding, delayed, shared)

    def alone(self, side: str) -> "Format":
        """The same format in one direction."""
        return Format.of(nvfp4.Quantizer(spec=self.spec, directions=side))


def _shared(spec: str, directions: str) -> Tuple[str, str]:
    row, _, column = spec.partition(" / ")
    row_shares = _shares(row) if directions != "column" else "nothing"
    column_shares = _shares(column or row) if directions != "row" else "nothing"
    if not column and row_shares == "tensor":
        column_shares = "nothing"  # it is the same amax
    return row_shares, column_shares


def _shares(format: str) -> str:
    """Which of a direction's scales depend on several workers' parts. A block belongs to one."""
    name = format.split("(")[0].split(" ")[0]
    if name == "nvfp4":
        return "line" if "row-scaled" in format else "stored"
    return "tensor" if name == "fp8" else "nothing"


class Formats(NamedTuple):
    """How the tensors of a linear layer are quantized.

    ``finite`` says what is done about NaN and infinities: "keep" or "refuse".
    ``accumulators`` are those of FP8 products on a GPU, in fprop, dgrad and wgrad.

    The rest is all of it as one text for operations that compute a whole pass: with a backward pass
    to come, with one that asks for no gradient of the weight, and without one; they are empty if
    there is no such operation. ``coded`` is that of a forward pass alone whose weight is there as
    codes, empty if there is none.
    """

    input: Format
    weight: Format
    grad_output: Format
    input_row: Format
    weight_row: Format
    alignment: int
    finite: str
    accumulators: Tuple[str, str, str]
    trained: str
    frozen: str
    evaluated: str
    coded: str

    def __str__(self) -> str:
        return f"input={self.input.spec}, weight={self.weight.spec}, grad_output={self.grad_output.spec}"

    def for_codes(self, spec: str) -> "Formats":
        """The same for a weight that is there as codes in this format."""
        return self if spec == self.weight.spec else _for_codes(self, spec)

    @property
    def tensors(self) -> Tuple[Format, Format, Format]:
        """What it says about each tensor."""
        return self.input, self.weight, self.grad_output

    @property
    def quantizes(self) -> bool:
        """Whether any tensor is quantized."""
        return any(f.spec != "high-precision" for f in self.tensors)


def recipe_of(recipe: Union[str, nvfp4.Recipe]) -> nvfp4.Recipe:
    """A recipe, or a preset by its name."""
    if not isinstance(recipe, (str, nvfp4.Recipe)):
        kind = type(recipe).__name__
        raise TypeError(f"recipe: expected the name of a preset or an nvfp4.Recipe, got {kind}")
    return nvfp4.Recipe(recipe) if isinstance(recipe, str) else recipe


def formats_of(plan: nvfp4.Plan, path: str, expert: Optional[int] = None) -> Formats:
    """What a plan says about the linear layer at a path."""
    input, weight, grad_output = (
        Format.of(plan.quantizer(path, slot, expert=expert)) for slot in ("input", "weight", "grad_output")
    )
    alignment = plan.alignment(path) or 1
    alone = input.alone("row"), weight.alone("row")
    texts = _texts(input, weight, grad_output, plan.accumulators)
    return Formats(input, weight, grad_output, *alone, alignment, plan.finite, plan.accumulators, *texts)


def _texts(
    input: Format, weight: Format, grad_output: Format, accumulators: Tuple[str, str, str]
) -> Tuple[str, str, str, str]:
    """What an operation computes a whole pass from. There is none for what is not quantized in a
    direction, nor for random numbers in the forward pass.
    """
    formats = (input, weight, grad_output)
    text = " | ".join([*(f.spec for f in formats), " ".join(accumulators)])
    coded = "" if "stochastic" in (input.rounding, weight.rounding) else f"{text} | evaluated"
    whole = all(f.directions == "both" and "high-precision" not in f.spec for f in formats)
    if not whole or not coded:
        return "", "", "", coded
    return f"{text} | trained", f"{text} | frozen", f"{text} | evaluated", coded


@torch.compiler.assume_constant_result
def _for_codes(formats: Formats, spec: str) -> Formats:
    return _once_for_codes(formats, spec)


@functools.lru_cache(maxsize=None)
def _once_for_codes(formats: Formats, spec: str) -> Formats:
    weight = Format.of(nvfp4.Quantizer(spec=spec, directions="both"))
    texts = _texts(formats.input, weight, formats.grad_output, formats.accumulators)
    alone = formats.input_row, weight.alone("row")
    return Formats(
        formats.input, weight, formats.grad_output, *alone, formats.alignment, formats.finite, formats.accumulators, *texts
    )


def plan_of(recipe: Union[str, nvfp4.Recipe], modules: list) -> nvfp4.Plan:
    """The plan of these modules."""
    return nvfp4.Plan(recipe_of(recipe), modules)


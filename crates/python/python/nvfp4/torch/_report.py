"""What became of the parameters of a model that was converted."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, NoReturn, Tuple

import torch

import nvfp4


class Converted(NamedTuple):
    """A layer whose products are quantized now."""

    name: str
    formats: str
    parameters: int


class Left(NamedTuple):
    """A module whose matrices are used as before, and why.

    ``wanted`` says whether the caller or the recipe asked for that, or no product reads it.
    """

    name: str
    kind: str
    reason: str
    parameters: int
    wanted: bool


class Conversion:
    """What :func:`convert_module` did: what it converted, what it left and why, and how many
    parameters each has.

    ``str`` is the whole report, ``line`` its summary. ``left`` lists modules with matrices; the
    vectors of norms and biases are in no list. ``model`` is the model that was given, which was
    changed in place.
    """

    def __init__(
        self, model: torch.nn.Module, plan: nvfp4.Plan, converted: List[Converted], left: List[Left], parameters: int
    ):
        self.model, self.plan, self.converted, self.left, self.parameters = model, plan, converted, left, parameters
        self.warnings: List[str] = [*plan.warnings, *self._unconverted()]

    @property
    def converted_parameters(self) -> int:
        """How many parameters are in layers that were converted."""
        return sum(layer.parameters for layer in self.converted)

    @property
    def line(self) -> str:
        """The summary."""
        layers = f"{len(self.converted)} layer{'' if len(self.converted) == 1 else 's'}"
        share = f"{_share(self.converted_parameters, self.parameters)} of {self.parameters:,} parameters"
        left = "; ".join(f"{_names([l.name for l in alike])} ({reason})" for (_, reason), alike in self._alike().items())
        return f"nvfp4: converted {layers} ({share}); left {left or 'no matrix'}"

    def _alike(self) -> Dict[Tuple[str, str], List[Left]]:
        """What was left, by kind and reason."""
        groups: Dict[Tuple[str, str], List[Left]] = {}
        for left in self.left:
            groups.setdefault((left.kind, left.reason), []).append(left)
        return groups

    def _unconverted(self) -> List[str]:
        """The warning about a model of which much could not be converted."""
        alike = {key: [l for l in group if not l.wanted] for key, group in self._alike().items()}
        alike = {key: group for key, group in alike.items() if group}
        lost = sum(left.parameters for group in alike.values() for left in group)
        if 10 * lost < self.parameters or not lost:
            return []
        which = "; ".join(f"{_names([l.name for l in group])}: {kind}, {reason}" for (kind, reason), group in alike.items())
        return [f"{_share(lost, self.parameters)} of the parameters could not be converted: {which}"]

    def __str__(self) -> str:
        rows = [(c.name, "converted", f"{c.parameters:,}", c.formats) for c in self.converted]
        rows += [(l.name, "left", f"{l.parameters:,}", f"{l.kind}: {l.reason}") for l in self.left]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        table = [f"{r[0]:<{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}" for r in rows]
        return "\n".join([*table, self.line, *(f"warning: {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        return f"<{self.line}>"

    def __call__(self, *args, **kwargs) -> NoReturn:
        raise TypeError("this is the report of convert_module, which changes the model in place; call the model, report.model")


def _names(names: List[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"

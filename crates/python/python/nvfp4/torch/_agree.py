"""Amaxes that workers agree on: those of a tensor of which each has a part."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._formats import Format

Amaxes = List[Optional[Tensor]]


class Split(NamedTuple):
    """The process groups whose workers have other parts of a tensor: other rows of it (tokens of an
    activation, outputs of a weight), other columns (features).
    """

    rows: Tuple[Any, ...] = ()
    cols: Tuple[Any, ...] = ()

    @classmethod
    def of(cls, group: Any) -> "Split":
        """What a group stands for: its workers have other rows."""
        if isinstance(group, Split):
            return group
        return cls() if group is None else cls((group,))

    def groups(self, shared: str, side: str) -> Tuple[Any, ...]:
        """The groups that agree on the amaxes of a direction, by what ``Format.shared`` says of it.

        A line of the row direction is a row, which only workers with other columns have parts of.
        """
        if shared == "nothing":
            return ()
        if shared == "line":
            return self.cols if side == "row" else self.rows
        return self.rows + self.cols


class Part(NamedTuple):
    """A worker's part of a tensor. ``quantize`` makes its arrays, from the amaxes of the row and of
    the column direction where they are given.
    """

    x: Tensor
    format: Format
    split: Split
    quantize: Callable[[Optional[Tensor], Optional[Tensor]], List[Tensor]]

    @property
    def groups(self) -> List[Tuple[Any, ...]]:
        """Those that agree in each direction."""
        sides = ("row", "column")
        return [self.split.groups(shared, side) for shared, side in zip(self.format.shared, sides)]

    @property
    def waits(self) -> bool:
        """Whether the column direction is made of rows that are to be agreed on before."""
        return self.format.spec.endswith(" from row") and all(self.groups)

    def amaxes(self) -> Amaxes:
        """Those of this part that are to be agreed on, and can be."""
        (row, column), (of_row, of_column) = self.format.shared, self.groups
        if self.format.spec.endswith(" from row") and column == "tensor" and of_column:
            raise ValueError(
                f"{self.format.spec}: workers cannot agree on an amax of decoded values; "
                "leave out 'from row'"
            )
        asked = [bool(of_row), bool(of_column) and not self.waits]
        stored = any(of and shared != "tensor" for of, shared in zip(asked, (row, column)))
        arrays = self.quantize(None, None) if stored else []
        return [
            None if not of else amax_of(self.x) if shared == "tensor" else self.stored(arrays, side)
            for of, shared, side in zip(asked, (row, column), ("row", "column"))
        ]

    def stored(self, arrays: List[Tensor], side: str) -> Tensor:
        """The amaxes that the arrays of a direction store."""
        end = self.format.row if side == "row" else self.format.row + self.format.column
        return arrays[end - 1].clone()


def agreed(parts: Sequence[Part]) -> List[Amaxes]:
    """The amaxes of whole tensors, in both directions; None where a part has its own. It takes one
    reduction, and one more where the columns of a tensor are made of its decoded rows.
    """
    found = [part.amaxes() for part in parts]
    _reduce([pair for part, amaxes in zip(parts, found) for pair in zip(amaxes, part.groups)])
    late = [(part, amaxes) for part, amaxes in zip(parts, found) if part.waits]
    for part, amaxes in late:
        amaxes[1] = part.stored(part.quantize(amaxes[0], None), "column")
    _reduce([(amaxes[1], part.groups[1]) for part, amaxes in late])
    return found


def _reduce(amaxes: Sequence[Tuple[Optional[Tensor], Tuple[Any, ...]]]) -> None:
    """Makes amaxes those of all workers of their groups, in place."""
    together: Dict[Tuple[Any, ...], List[Tensor]] = {}
    for amax, groups in amaxes:
        if amax is not None:
            together.setdefault(groups, []).append(amax)
    for groups, of in together.items():
        flat = torch.cat([amax.reshape(-1) for amax in of]) if len(of) > 1 else of[0]
        for group in groups:
            torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
        if len(of) > 1:
            for amax, whole in zip(of, flat.split([amax.numel() for amax in of])):
                amax.copy_(whole.view_as(amax))


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, NaN left out; 0 of nothing."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.detach().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax().float().reshape(1)

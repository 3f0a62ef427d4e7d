"""Amaxes that workers agree on: those of a tensor of which each has a part."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

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
    the column direction where they are given. ``known`` are its own amaxes, if they were found
    before.
    """

    x: Tensor
    format: Format
    split: Split
    quantize: Callable[[Optional[Tensor], Optional[Tensor]], List[Tensor]]
    known: Optional[Amaxes] = None

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
        if self.known is not None:
            return [None if amax is None else amax.clone() for amax in self.known]
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
    return agreeing(parts)()


def agreeing(parts: Sequence[Part]) -> Callable[[], List[Amaxes]]:
    """The same, begun: other work goes on until the amaxes are asked for."""
    found = [part.amaxes() for part in parts]
    reduced = _reducing([pair for part, of in zip(parts, found) for pair in zip(of, part.groups)])

    def finish() -> List[Amaxes]:
        reduced()
        late = [(part, amaxes) for part, amaxes in zip(parts, found) if part.waits]
        for part, amaxes in late:
            amaxes[1] = part.stored(part.quantize(amaxes[0], None), "column")
        _reducing([(amaxes[1], part.groups[1]) for part, amaxes in late])()
        return found

    return finish


def _reducing(amaxes: Sequence[Tuple[Optional[Tensor], Tuple[Any, ...]]]) -> Callable[[], None]:
    """Makes amaxes those of all workers of their groups, in place, by one reduction for a group.
    Begins with it, and gives what ends it.
    """
    there = [(amax, groups) for amax, groups in amaxes if amax is not None]
    each = list(dict.fromkeys(group for _, groups in there for group in groups))

    def reducing(group: Any) -> Callable[[], None]:
        of = [amax for amax, groups in there if group in groups]
        flat = torch.cat([amax.reshape(-1) for amax in of]) if len(of) > 1 else of[0]
        wait = begun(torch.distributed.all_reduce, flat, torch.distributed.ReduceOp.MAX, group=group)

        def finish() -> None:
            wait()
            if len(of) > 1:
                for amax, whole in zip(of, flat.split([amax.numel() for amax in of])):
                    amax.copy_(whole.view_as(amax))

        return finish

    for group in each[:-1]:  # what the last one reduces comes of these
        reducing(group)()
    return reducing(each[-1]) if each else lambda: None


def begun(collective: Callable[..., Any], *args: Any, group: Any) -> Callable[[], Any]:
    """Begins what workers do together, and gives what waits for its end. In a compiler's graph it
    ends at once.
    """
    if torch.compiler.is_compiling():
        collective(*args, group=group)
        return lambda: None
    return collective(*args, group=group, async_op=True).wait


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, NaN left out; 0 of nothing."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.detach().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax().float().reshape(1)

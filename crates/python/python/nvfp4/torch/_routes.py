"""Where tokens go when workers have some experts each: to the workers of their experts, and back."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from ._parallel import Workers


class Routes:
    """The ways of a batch's tokens: to the workers of their experts, and back.

    Every worker of the ``group`` (all processes, if none is given) has the same number of experts:
    the first worker the first ones, and so on. ``m_splits`` has the numbers of this worker's tokens
    for each expert of all workers; tokens are sorted by expert. Workers tell each other these
    numbers once, here.

    ``dispatch`` and ``combine`` are given to layers in the place of numbers of tokens:

        routes = nvfp4.torch.Routes(m_splits, group)
        h = up(x, routes.dispatch)                         # x travels as codes
        y = down(torch.nn.functional.gelu(h), routes.combine)  # and so does the gradient of y

    Both layers are :class:`GroupedLinear` with this worker's experts. Between them, tokens lie in
    the order of these experts, and for each expert in the order of workers; ``here`` has their
    numbers. Called with a tensor, ``dispatch`` and ``combine`` move its rows as they are, as for
    probabilities of tokens.
    """

    def __init__(self, m_splits: Union[Sequence[int], Tensor], group: Any = None):
        group = dist.group.WORLD if group is None else group
        self.workers = Workers(group)
        self.size = dist.get_world_size(group)
        numbers = torch.as_tensor(m_splits, dtype=torch.int64)
        if numbers.ndim != 1 or len(numbers) == 0 or len(numbers) % self.size or int(numbers.min()) < 0:
            raise ValueError(
                f"Routes: expected the numbers of tokens for all experts, as many for each of {self.size} workers, "
                f"got {numbers.tolist()}"
            )
        # Numbers travel where the group's tensors do.
        if dist.get_backend(group) == "nccl":
            numbers = numbers.cuda()
        others = torch.empty_like(numbers)
        dist.all_to_all_single(others, numbers.contiguous(), group=group)
        self.sent: List[int] = numbers.tolist()
        # By worker, then by expert of this one.
        self.received: List[List[int]] = others.view(self.size, -1).tolist()

    @property
    def group(self) -> Any:
        return self.workers.group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def experts(self) -> int:
        """How many experts a worker has."""
        return len(self.sent) // self.size

    @property
    def here(self) -> List[int]:
        """How many tokens each expert of this worker gets."""
        return [sum(of) for of in zip(*self.received)]

    @property
    def dispatch(self) -> "Passage":
        """From the workers of tokens to those of experts."""
        return Passage(self, "dispatch")

    @property
    def combine(self) -> "Passage":
        """From the workers of experts to those of tokens."""
        return Passage(self, "combine")

    def __deepcopy__(self, memo: Any) -> "Routes":
        return self

    def to_experts(self, x: Tensor) -> Tensor:
        """Moves rows to the workers of their experts."""
        arrived = x.new_empty((sum(map(sum, self.received)), *x.shape[1:]))
        self._exchange(arrived, x, [sum(of) for of in self.received], self._to_workers())
        return _chunks(arrived, self.received, by_worker=True)

    def to_tokens(self, y: Tensor) -> Tensor:
        """Moves rows back."""
        arrived = y.new_empty((sum(self.sent), *y.shape[1:]))
        sent = _chunks(y, self.received, by_worker=False)
        self._exchange(arrived, sent, self._to_workers(), [sum(of) for of in self.received])
        return arrived

    def pieces(self, sent: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> List[List[Tensor]]:
        """Sends a piece of bytes for each of all experts. Gives the pieces that arrive, by expert
        of this worker, then by worker; ``sizes`` are theirs, by worker, then by expert.
        """
        each = self.experts
        counts = [sum(of.numel() for of in sent[i * each : i * each + each]) for i in range(self.size)]
        whole = torch.cat(list(sent))
        arrived = whole.new_empty(sum(map(sum, sizes)))
        self._exchange(arrived, whole, [sum(of) for of in sizes], counts)
        flat = arrived.split([size for of in sizes for size in of])
        return [list(flat[expert::each]) for expert in range(each)]

    def sums(self, values: Tensor) -> Tensor:
        """The sums over workers of a row for each of all experts: those of this worker's experts."""
        arrived = torch.empty_like(values)
        dist.all_to_all_single(arrived, values.contiguous(), group=self.group)
        return arrived.view(self.size, self.experts, *values.shape[1:]).sum(0)

    def _to_workers(self) -> List[int]:
        each = self.experts
        return [sum(self.sent[i * each : i * each + each]) for i in range(self.size)]

    def _exchange(self, arrived: Tensor, sent: Tensor, received: List[int], counts: List[int]) -> None:
        dist.all_to_all_single(arrived, sent.contiguous(), received, counts, group=self.group)


def _chunks(rows: Tensor, numbers: List[List[int]], by_worker: bool) -> Tensor:
    """Rows that lie by worker, then by expert, the other way around; or back."""
    if len(numbers) == 1 or len(numbers[0]) == 1:
        return rows
    outer = numbers if by_worker else [list(of) for of in zip(*numbers)]
    flat = rows.split([number for of in outer for number in of])
    inner = len(outer[0])
    return torch.cat([flat[i] for first in range(inner) for i in range(first, len(flat), inner)])


class Passage(NamedTuple):
    """One way of tokens: "dispatch" or "combine". Called, it moves rows as they are."""

    routes: Routes
    way: str

    def __call__(self, x: Tensor) -> Tensor:
        return _Moved.apply(x, self.routes, self.way)

    def checked(self, x: Tensor, experts: int, name: str) -> None:
        """Refuses tokens that are not those of the routes."""
        routes = self.routes
        if routes.experts != experts:
            raise ValueError(
                f"{name}:m_splits: the routes have {routes.experts} experts for each of {routes.size} workers, the layer has {experts}"
            )
        expected = sum(routes.sent) if self.way == "dispatch" else sum(routes.here)
        if x.shape[0] != expected:
            raise ValueError(f"{name}:input: expected {expected} tokens to {self.way}, got {x.shape[0]}")


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, routes, way):
        ctx.routes, ctx.way = routes, way
        return routes.to_experts(x) if way == "dispatch" else routes.to_tokens(x)

    @staticmethod
    def backward(ctx, dy):
        back = ctx.routes.to_tokens if ctx.way == "dispatch" else ctx.routes.to_experts
        return back(dy), None, None


class Padding(NamedTuple):
    """Tokens of experts with those of each worker in whole blocks, by worker, then by expert."""

    received: List[List[int]]
    # Where tokens are among those with padding; None if there is none.
    at: Optional[Tensor]

    @classmethod
    def of(cls, routes: Routes, alignment: int, device: torch.device) -> "Padding":
        whole = [[-(-number // alignment) * alignment for number in of] for of in routes.received]
        if whole == routes.received:
            return cls(whole, None)
        numbers, sizes = ([n for of in zip(*each) for n in of] for each in (routes.received, whole))
        return cls(whole, tokens_among(numbers, sizes, device))

    @property
    def here(self) -> List[int]:
        """The rows of each expert."""
        return [sum(of) for of in zip(*self.received)]

    def put(self, x: Tensor) -> Tensor:
        """Tokens with zeros between them."""
        if self.at is None:
            return x
        return x.new_zeros(sum(self.here), x.shape[1]).index_copy(0, self.at, x)

    def take(self, y: Tensor) -> Tensor:
        """The tokens alone."""
        return y if self.at is None else y.index_select(0, self.at)


def tokens_among(numbers: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where so many tokens are, each time, among as many rows as ``sizes`` says."""
    chunks = torch.arange(sum(sizes), device=device).split(list(sizes))
    return torch.cat([chunk[:number] for chunk, number in zip(chunks, numbers)])

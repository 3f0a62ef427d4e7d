"""Passes of modules in CUDA graphs: what is captured, in which order, and what is replayed."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
Event = Tuple[str, int]


class Settings(NamedTuple):
    """How passes are captured."""

    warmups: int = 3
    allow_unused_input: bool = False
    pool: Any = None
    retain_graph: bool = False
    clone_param_grads: bool = True
    before_warmup: Optional[Callable] = None
    after_warmup: Optional[Callable] = None


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class Pass:
    """A forward pass of a module and the backward pass that follows it, each in its graph.

    Tensors of the sample are the memory that the graphs read: a replay copies its own into them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        call: Callable,
        args: Sequence,
        kwargs: Dict[str, Any],
        hooks: Optional[Dict[str, Dict]],
        settings: Settings,
    ) -> None:
        self.module, self.call, self.settings = module, call, settings
        self.args, self.kwargs, self.hooks = tuple(args), dict(kwargs), hooks or {}
        self.training = module.training
        self.inputs = self._tensors(self.args, self.kwargs)
        if not all(isinstance(value, Tensor) for value in self.inputs):
            raise TypeError("sample_args and sample_kwargs: a graph reads tensors alone")
        self.parameters = tuple(module.parameters())
        self.outputs: List[Any] = []
        self.form: Any = None
        # For each output: the memory of its gradient. For each input and parameter: its gradient.
        self.given: List[Optional[Tensor]] = []
        self.gradients: List[Optional[Tensor]] = []
        self.cloned: List[bool] = []
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def _tensors(self, args: Tuple, kwargs: Dict[str, Any]) -> List[Any]:
        """The tensors of a call, in the order of the sample."""
        missing = [name for name in self.kwargs if name not in kwargs]
        unknown = [name for name in kwargs if name not in self.kwargs and kwargs[name] is not None]
        if missing or unknown:
            what = f"misses {', '.join(missing)}" if missing else f"has no {', '.join(unknown)}"
            raise TypeError(f"this graph was captured with other sample_kwargs: the call {what}")
        return tree_flatten((args, [kwargs[name] for name in self.kwargs]))[0]

    def _around(self, graph: Any, pool: Any) -> Any:
        return contextlib.nullcontext() if pool is None else torch.cuda.graph(graph, pool=pool)

    def _call_hooks(self, kind: str) -> None:
        for hook in self.hooks.get(kind, {}).values():
            if hook(self.module) is not None:
                raise RuntimeError(f"capture_time_hooks: {kind} must return nothing")

    def forward(self, pool: Any = None) -> None:
        """The forward pass; it is captured if there is a pool."""
        self._call_hooks("forward_pre_hooks")
        gradients = contextlib.nullcontext() if self.training else torch.no_grad()
        with gradients, self._around(self.forward_graph, pool):
            made = self.call(*self.args, **self.kwargs)
        self._call_hooks("forward_hooks")
        self.outputs, self.form = tree_flatten(made)

    def backward(self, pool: Any = None) -> None:
        """The backward pass, if the module trains."""
        if not self.training:
            return
        self._call_hooks("backward_pre_hooks")
        self.given = [torch.zeros_like(o) if _wants_gradient(o) else None for o in self.outputs]
        outputs = [o for o in self.outputs if _wants_gradient(o)]
        read = [*self.inputs, *self.parameters]
        wanted = [value for value in read if value.requires_grad]
        found: Sequence[Optional[Tensor]] = ()
        if outputs and wanted:
            with self._around(self.backward_graph, pool):
                found = torch.autograd.grad(
                    outputs, wanted, [g for g in self.given if g is not None],
                    retain_graph=self.settings.retain_graph, allow_unused=True,
                )  # fmt: skip
        self._call_hooks("backward_hooks")
        rest = iter(found)
        self.gradients = [next(rest, None) if value.requires_grad else None for value in read]
        self._check_inputs()

    def _check_inputs(self) -> None:
        for at, (value, gradient) in enumerate(zip(self.inputs, self.gradients)):
            if value.requires_grad and gradient is None and not self.settings.allow_unused_input:
                raise RuntimeError(
                    f"input {at} of {type(self.module).__name__} requires a gradient and has none "
                    "after the backward pass: give allow_unused_input=True"
                )

    def finish(self) -> None:
        """After the capture: parameters without gradients are not parameters of the graph."""
        count, grads = len(self.inputs), self.gradients
        of = list(zip(self.parameters, grads[count:]))
        self.parameters = tuple(parameter for parameter, gradient in of if gradient is not None)
        self.gradients = grads[:count] + [gradient for _, gradient in of if gradient is not None]
        self.cloned = [False] * count + [
            self.settings.clone_param_grads and not getattr(p, "skip_backward_post_hook", False)
            for p in self.parameters
        ]

    def replay_forward(self, inputs: Sequence[Tensor]) -> Tuple:
        """Outputs in the memory of the graph."""
        for memory, value in zip(self.inputs, inputs):
            if memory.data_ptr() != value.data_ptr():
                memory.copy_(value)
        self.forward_graph.replay()
        return tuple(o.detach() if isinstance(o, Tensor) else o for o in self.outputs)

    def replay_backward(self, given: Sequence[Optional[Tensor]]) -> Tuple:
        """The gradients of inputs and parameters."""
        for memory, value in zip(self.given, given):
            if memory is not None and value is not None and memory.data_ptr() != value.data_ptr():
                memory.copy_(value)
        self.backward_graph.replay()
        # Whoever keeps a parameter's gradient would see it change with the next replay.
        return tuple(
            None if found is None else found.detach().clone() if own else found.detach()
            for found, own in zip(self.gradients, self.cloned)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._tensors(args, kwargs)
        if len(inputs) != len(self.inputs):
            raise TypeError(
                f"this graph was captured with {len(self.inputs)} tensors, got {len(inputs)}"
            )
        if self.training:
            made = _Replay.apply(self, *inputs, *self.parameters)
        else:
            with torch.no_grad():
                made = self.replay_forward(inputs)
        return tree_unflatten(list(made), self.form)

    def reset(self) -> None:
        """Lets go of the graphs."""
        self.forward_graph.reset()
        self.backward_graph.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one: Pass, *tensors: Tensor):
        ctx.one = one
        made = one.replay_forward(tensors[: len(one.inputs)])
        plain = [made[at] for at, memory in enumerate(one.given) if memory is None]
        ctx.mark_non_differentiable(*(value for value in plain if isinstance(value, Tensor)))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx, *given: Tensor):
        return (None, *ctx.one.replay_backward(given))


def plain_order(count: int) -> List[Event]:
    """All forward passes, then all backward passes from the last to the first."""
    forward: List[Event] = [("forward", number) for number in range(count)]
    return forward + [("backward", number) for number in reversed(range(count))]


def pipeline(
    order: Sequence[int], layers: Union[None, int, Sequence[int]], modules: int, samples: int
) -> Tuple[List[Event], List[int]]:
    """The events of a pipeline's order, and for each pass the number of its module.

    An order names chunks of layers from 1 on: ``2`` is a forward pass of the second chunk, ``-2``
    is its backward pass. A sample belongs to each chunk, then to each micro-batch, then to each
    layer.
    """
    if any(chunk != int(chunk) for chunk in order):
        raise NotImplementedError("_order: gradients of weights as events of their own (n - 0.5)")
    chunks = max(order)
    batches = len(order) // (2 * chunks)
    if layers is None:
        layers = modules // chunks
    each = [layers] * chunks if isinstance(layers, int) else list(layers)
    if len(each) != chunks or sum(each) != modules or samples != modules * batches:
        raise ValueError(
            f"_order: {chunks} chunks of {each} layers and {batches} micro-batches are of "
            f"{sum(each)} modules and {sum(each) * batches} samples, got {modules} and {samples}"
        )
    first = [0, *itertools.accumulate(each)]
    events: List[Event] = []
    seen: Counter = Counter()
    for chunk in order:
        at = abs(chunk) - 1
        begin = first[at] * batches + seen[chunk] * each[at]
        numbers = range(begin, begin + each[at])
        kind, there = ("forward", numbers) if chunk > 0 else ("backward", reversed(numbers))
        events += [(kind, number) for number in there]
        seen[chunk] += 1
    expected = sorted(plain_order(samples))
    places = {event: place for place, event in enumerate(events)}
    if sorted(events) != expected or any(
        places["backward", number] < places["forward", number] for number in range(samples)
    ):
        raise ValueError(
            f"_order: each chunk needs {batches} forward passes, and a backward pass after each: "
            f"{order}"
        )
    chunk_layers = [range(begin, begin + some) for begin, some in zip(first, each)]
    of = [number for numbers in chunk_layers for _ in range(batches) for number in numbers]
    return events, of


def capture(
    passes: Sequence[Pass],
    events: Sequence[Event],
    settings: Settings,
    begins: Callable[[str], None],
) -> None:
    """Warms up, then captures the passes in the order of the events, and says which begins. Random
    numbers go on as if nothing had been computed.
    """
    random = torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        if settings.before_warmup is not None:
            settings.before_warmup()
        # Once at least: what a module makes in its first call is not to be in the graph.
        for _ in range(max(1, settings.warmups)):
            for kind, number in events:
                getattr(passes[number], kind)()
        if settings.after_warmup is not None:
            settings.after_warmup()
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle() if settings.pool is None else settings.pool
    collects = gc.isenabled()
    gc.disable()  # it may destroy another graph in the middle of a capture, which CUDA forbids
    try:
        for kind, number in events:
            begins(kind)
            getattr(passes[number], kind)(pool)
    finally:
        if collects:
            gc.enable()
    for one in passes:
        one.finish()
    torch.cuda.set_rng_state(random)

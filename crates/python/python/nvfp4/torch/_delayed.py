"""Delayed scaling: scales that are made from the amaxes of earlier steps, in buffers of the layers.

A step quantizes with the scales that are there, and joins the amaxes that it sees to the histories
by a maximum: so a forward pass that is computed again changes nothing. :func:`update_scales` then
ends the step.
"""

from __future__ import annotations

from typing import (
    Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple,
)  # fmt: skip

import torch
from torch import Tensor

import nvfp4

from ._formats import Format, Formats
from ._kept import weights_may_have_changed


class Kept(NamedTuple):
    """What is kept for one tensor: for both its directions, or for each of them."""

    scale: Optional[Tensor] = None
    history: Optional[Tensor] = None
    column_scale: Optional[Tensor] = None
    column_history: Optional[Tensor] = None

    def note(self, amaxes: List[Tensor], at: int = 0) -> int:
        """Joins amaxes to this step's: one for each scale, from ``at`` on. Gives the next place."""
        for scale, history in ((self.scale, self.history), (self.column_scale, self.column_history)):
            if scale is not None:
                if history is not None:
                    now = history[:1]
                    torch.maximum(now, amaxes[at], out=now)
                at += 1
        return at

    def number(self) -> int:
        """How many scales there are."""
        return (self.scale is not None) + (self.column_scale is not None)

    def unseen(self) -> "Kept":
        """The same scales, for a tensor that is not to be remembered."""
        return self._replace(history=None, column_history=None)


class Given(NamedTuple):
    """How a tensor was quantized by the module that hands it over: with this scale or from this
    amax. Its numbers are those of its codes, so that whoever quantizes them so gets the same codes.
    """

    spec: str
    scale: Optional[Tensor] = None
    amax: Optional[Tensor] = None


class HandedOver(NamedTuple):
    """What a linear layer is handed over quantized: its input, its output's gradient."""

    input: Optional[Given] = None
    grad_output: Optional[Given] = None


class State(NamedTuple):
    """What is kept for the tensors of a linear layer; None for a tensor without delayed scaling."""

    input: Optional[Kept] = None
    weight: Optional[Kept] = None
    grad_output: Optional[Kept] = None

    def given(self, formats: Formats, handed: HandedOver) -> "State":
        """The same with the scales of what is handed over, whose amaxes are not this layer's to
        remember. What comes in another format than this layer's is quantized as everything else.
        """

        def scale(given: Optional[Given], format: Format, kept: Optional[Kept]) -> Optional[Kept]:
            fits = given is not None and given.spec == format.spec and given.scale is not None
            return Kept(given.scale) if fits and given is not None else kept

        return self._replace(
            input=scale(handed.input, formats.input, self.input),
            grad_output=scale(handed.grad_output, formats.grad_output, self.grad_output),
        )


class Scale(torch.nn.Module):
    """A scale and the amaxes that it is made from: that of the step under way, then those of
    earlier steps, oldest first.
    """

    scale: Tensor
    history: Tensor
    # The scale before the last update, for what is computed again after it.
    before: Optional[Tensor] = None
    # What updates history and scale in the place of the spec's rule.
    rule: Optional[Callable[[Tensor, Tensor], None]] = None

    def __init__(self, spec: Optional[str], steps: int, device):
        super().__init__()
        self.spec = spec
        self.register_buffer("scale", None)
        self.register_buffer("history", None)
        self.begin(steps, device)

    def begin(self, steps: int, device) -> None:
        """Forgets all steps."""
        self.before = None
        self.scale = torch.ones(1, dtype=torch.float32, device=device)
        self.history = torch.zeros(steps, dtype=torch.float32, device=device)

    def __getstate__(self):
        # A function may have no place in a pickle. The next step has it again.
        return {**self.__dict__, "rule": None}

    def _apply(self, fn, recurse=True):
        scale, history = self.scale, self.history
        self.before = None
        super()._apply(fn, recurse)
        device = self.scale.device
        if scale.is_meta:  # which has no numbers to take along
            self.begin(history.numel(), device)
        else:  # to another device, but never to another type
            self.scale, self.history = scale.to(device), history.to(device)
        return self

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        # What is missing is not: the state of a model without delayed scaling begins anew.
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, [], unexpected, errors)

    def extra_repr(self) -> str:
        return f"{self.spec}"


class Scales(torch.nn.Module):
    """The scales of a layer, by the names of its tensors."""

    def keep(self, name: str, spec: str, device) -> None:
        """Keeps what a tensor of this spec asks for.

        State with the same rule stays, other state begins anew.
        """
        for part, rule in nvfp4.Delayed.parts(spec).items():
            name_of_part = name if part == "both" else f"{name}_{part}"
            there, steps = self._modules.get(name_of_part), nvfp4.Delayed(rule).history
            if isinstance(there, Scale) and there.spec in (None, rule) and there.history.numel() == steps:
                there.spec = rule  # which a state dict does not say
            else:
                self.add_module(name_of_part, Scale(rule, steps, device))

    def get(self, name: str, format: Format, when: str = "now") -> Optional[Kept]:
        """What is kept for a tensor of this format, "now" or "before" the last update."""
        if not format.delayed:
            return None
        buffers_of = self._buffers_of if when == "now" else self._before
        if format.delayed == ("both",):
            return Kept(*buffers_of(name))
        row = buffers_of(f"{name}_row") if "row" in format.delayed else (None, None)
        column = buffers_of(f"{name}_column") if "column" in format.delayed else (None, None)
        return Kept(*row, *column)

    def _before(self, name: str) -> Tuple[Tensor, None]:
        """The scale before the last update. What the tensor was is in the history already."""
        scale = self._modules[name]
        assert isinstance(scale, Scale)
        return scale.scale if scale.before is None else scale.before, None

    def _buffers_of(self, name: str) -> Tuple[Tensor, Tensor]:
        scale = self._modules[name]
        assert isinstance(scale, Scale)
        return scale.scale, scale.history


class Delays(torch.nn.Module):
    """A layer whose tensors may have delayed scaling."""

    amax_group: Any
    delayed: Optional[Scales]

    def not_finite(self) -> Tuple[Optional[Tensor], List[str]]:
        """The flags on a GPU, if something is watched there, and the tensors that they are for."""
        return None, []

    def part_groups(self) -> List[Any]:
        """The process groups whose workers have other parts of its weights."""
        return []

    def keep_scales(self, formats: Mapping[str, Formats], device) -> None:
        """Keeps what the formats of linear layers ask for; each has a prefix for the names of its
        tensors.

        What another recipe kept stays, so that a recipe can be left and come back to.
        """
        specs = {
            prefix + slot: format.spec
            for prefix, of in formats.items()
            for slot, format in (("input", of.input), ("weight", of.weight), ("grad_output", of.grad_output))
            if format.delayed
        }
        self.keep_each(specs, device)

    def keep_each(self, specs: Mapping[str, str], device) -> None:
        """Keeps what tensors of these names and specs ask for."""
        if not hasattr(self, "delayed"):
            self.delayed = None
        if specs and self.delayed is None:
            self.delayed = Scales()
        for name, spec in specs.items():
            self.delayed.keep(name, spec, device)  # type: ignore[union-attr]

    def state_of(self, formats: Formats, prefix: str = "") -> State:
        """What is kept for the tensors of a linear layer."""
        slots = (("input", formats.input), ("weight", formats.weight), ("grad_output", formats.grad_output))
        return State(*[self.kept_for(prefix + slot, format) for slot, format in slots])

    def kept_for(self, name: str, format: Format) -> Optional[Kept]:
        """What is kept for a tensor of this format."""
        if self.delayed is None:
            return None
        again = pass_of(name) == "forward" and self._repeats()
        return self.delayed.get(name, format, "before" if again else "now")

    def _repeats(self) -> bool:
        """Whether a forward pass is computed again whose scales have moved on since."""
        return False

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # A layer whose recipe is not known yet keeps what it is given, for the recipe that comes.
        begin, device = f"{prefix}delayed.", self._home()
        for key, history in state_dict.items():
            if key.startswith(begin) and key.endswith(".history"):
                name = key[len(begin) : -len(".history")]
                self.delayed = Scales() if self.delayed is None else self.delayed
                if name not in self.delayed._modules:
                    self.delayed.add_module(name, Scale(None, history.numel(), device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        device = self._home()
        for scale in () if self.delayed is None else self.delayed.children():
            # Parameters were assigned, and the state may not say what the scales are.
            if isinstance(scale, Scale) and scale.scale.is_meta and device.type != "meta":
                scale.begin(scale.history.numel(), device)

    def _home(self) -> torch.device:
        """Where its state begins: with its parameters, if it has any."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))


def update_scales(model: torch.nn.Module) -> None:
    """Ends a step of delayed scaling: histories move on, and scales follow from them.

    Call it once per step of the optimizer.

    Workers of :func:`reduce_amaxes` agree on amaxes here, in one reduction. A model without delayed
    scaling is left as it is.

    >>> import torch, nvfp4.torch
    >>> model = torch.nn.Linear(64, 64)
    >>> report = nvfp4.torch.convert_module(model, "delayed_scaling")
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> model(torch.randn(32, 64)).sum().backward()
    >>> optimizer.step()
    >>> nvfp4.torch.update_scales(model)
    """
    layers = [module for module in model.modules() if isinstance(module, Delays)]
    update((layer, layer.amax_group) for layer in layers)
    if any(layer.delayed is not None for layer in layers):
        weights_may_have_changed()  # or rather what their codes are


def pass_of(name: str) -> str:
    """The pass of a tensor that something is kept for: "forward" or "backward"."""
    tensor = name.removesuffix("_row").removesuffix("_column")
    backward = tensor.endswith("grad_output") or tensor in ("do", "dp", "dqkv")
    return "backward" if backward else "forward"


def keep_from_broadcasts(model: torch.nn.Module) -> None:
    """Makes ``DistributedDataParallel`` around a model leave the scales alone. It sends the buffers
    of the first worker to all others before each pass, but the amaxes of a step under way are each
    worker's own.
    """
    wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    inner: Any = model.module if wrapped else model
    names = [
        f"{path}.{name}"
        for path, module in inner.named_modules()
        if isinstance(module, Scale)
        for name in ("scale", "history")
    ]
    if not names:
        return
    there = getattr(inner, "_ddp_params_and_buffers_to_ignore", ())
    inner._ddp_params_and_buffers_to_ignore = sorted({*there, *names})
    if wrapped:
        outer: Any = model
        outer.parameters_to_ignore.update(names)
        outer._assign_modules_buffers()


def update(
    layers: Iterable[Tuple[Any, Any]], passes: Tuple[str, ...] = ("forward", "backward")
) -> None:
    """Ends passes of these layers, each with the group of workers that agree on its amaxes."""
    groups: Dict[Tuple[Any, ...], List[Scale]] = {}
    for layer, group in layers:
        if layer.delayed is not None:
            of = tuple(each for each in (group, *layer.part_groups()) if each is not None)
            groups.setdefault(of, []).extend(_known(layer.delayed, passes))
    for of, scales in groups.items():
        if scales:
            _update(scales, of)


def _known(scales: Scales, passes: Tuple[str, ...]) -> Iterator[Scale]:
    """Those of these passes whose rule is known and which have numbers."""
    of_these = (scale for name, scale in scales.named_children() if pass_of(name) in passes)
    real = (s for s in of_these if isinstance(s, Scale) and not s.history.is_meta)
    return (scale for scale in real if scale.spec is not None)


@torch.no_grad()
def _update(scales: List[Scale], groups: Tuple[Any, ...]) -> None:
    rules = [nvfp4.Delayed(str(scale.spec)) for scale in scales]
    device = scales[0].history.device
    amaxes = [scale.history[:1] for scale in scales]
    shared = [at for at, rule in enumerate(rules) if rule.reduction == "max"]
    if groups and shared:
        reduced = torch.cat([amaxes[at].to(device) for at in shared])
        for group in groups:
            torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group=group)
        for at, amax in zip(shared, reduced.split(1)):
            amaxes[at] = amax
    # Tensors of one rule on one GPU go together.
    together: Dict[Tuple[str, torch.device], List[int]] = {}
    for at, scale in enumerate(scales):
        if scale.rule is None:
            together.setdefault((str(scale.spec), scale.history.device), []).append(at)
        else:
            scale.before = scale.scale.clone()
            scale.history[:1].copy_(amaxes[at])
            scale.rule(scale.history, scale.scale)
    for (_, device), places in together.items():
        numbers = torch.cat([scales[at].scale for at in places])
        for at, number in zip(places, numbers.split(1)):
            scales[at].before = number
        update_some = _update_there if device.type == "cuda" else _update_here
        update_some(rules[places[0]], [scales[at] for at in places], torch.cat([amaxes[at].to(device) for at in places]))


def _update_there(rule: nvfp4.Delayed, scales: List[Scale], amaxes: Tensor) -> None:
    """Where the state is on a GPU, nothing waits for it, so a step can be captured."""
    history = torch.stack([scale.history for scale in scales], dim=1)
    numbers = torch.cat([scale.scale for scale in scales])
    rule.update_(history, numbers, amaxes)
    torch._foreach_copy_([scale.history for scale in scales], list(history.unbind(1)))
    torch._foreach_copy_([scale.scale for scale in scales], list(numbers.split(1)))


def _update_here(rule: nvfp4.Delayed, scales: List[Scale], amaxes: Tensor) -> None:
    for scale, amax in zip(scales, amaxes.tolist()):
        history, number = rule.update(scale.history.tolist(), scale.scale.item(), amax)
        scale.history.copy_(torch.tensor(history))
        scale.scale.fill_(number)

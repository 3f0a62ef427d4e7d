"""CUDA graphs of modules, under TransformerEngine's names."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch.utils._pytree import tree_leaves

from nvfp4.torch._delayed import Delays, Scale, pass_of
from nvfp4.torch._layer import Layer

from ._capture import HOOKS, Pass, Settings, capture, pipeline, plain_order
from ._modules import Follows
from ._recipe import Step, _inside, autocast, get_default_recipe, region

_OLD = {
    "fp8_enabled": "enabled", "fp8_calibrating": "calibrating", "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group", "fp8_weight_caching": "cache_quantized_params",
}  # fmt: skip


def make_graphed_callables(
    modules: Union[Callable, Tuple[Callable, ...]], sample_args: Tuple, num_warmup_iters: int = 3,
    allow_unused_input: bool = False, sample_kwargs: Any = None, fp8_enabled: Any = None,
    fp8_calibrating: Optional[bool] = None, fp8_recipe: Any = None, fp8_group: Any = None,
    fp8_weight_caching: Optional[bool] = None, enabled: Any = None,
    calibrating: Optional[bool] = None, recipe: Any = None, amax_reduction_group: Any = None,
    cache_quantized_params: Optional[bool] = None, _order: Optional[List[int]] = None,
    _num_layers_per_chunk: Optional[List[int]] = None, pool: Any = None,
    retain_graph_in_backward: bool = False, _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True, pre_warmup_hook: Optional[Callable] = None,
    post_warmup_hook: Optional[Callable] = None,
    capture_time_hooks: Optional[List[Optional[Dict[str, Dict]]]] = None,
) -> Any:  # fmt: skip
    """Captures passes of modules that follow ``autocast`` in CUDA graphs of a recipe. A call of a
    module then replays them. ``reset()`` of what is returned lets go of the graphs.

    Weights are quantized in the graph at every call: with ``cache_quantized_params`` a call says
    ``is_first_microbatch``, and the numbers are the same. Delayed scaling moves on with the region
    around a call, as without a graph. ``_reuse_graph_input_output_buffers`` saves no memory here.
    """
    given = _renamed(locals())
    several: Any = modules if isinstance(modules, tuple) else (modules,)
    if not isinstance(modules, tuple):
        sample_args = (sample_args,)
        sample_kwargs = None if sample_kwargs is None else (sample_kwargs,)
    on = given["enabled"]
    each = on if isinstance(on, tuple) else (bool(on),) * len(several)
    if len(each) != len(several):
        raise ValueError(
            f"enabled: expected one answer or {len(several)}, one for each module, got {len(each)}"
        )
    kwargs = ({},) * len(sample_args) if sample_kwargs is None else sample_kwargs
    hooks = [None] * len(several) if capture_time_hooks is None else capture_time_hooks
    _check(several, sample_args, kwargs, hooks)
    if _order is not None:
        events, of = pipeline(_order, _num_layers_per_chunk, len(several), len(sample_args))
    elif _reuse_graph_input_output_buffers:
        raise ValueError("_reuse_graph_input_output_buffers: it is of a pipeline, give its _order")
    else:
        events, of = plain_order(len(several)), list(range(len(several)))
        if len(sample_args) != len(several):
            raise ValueError(
                f"sample_args: expected {len(several)}, one for each module, got {len(sample_args)}"
            )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "make_graphed_callables captures CUDA graphs, and torch sees no GPU here; on the CPU "
            "call the modules as they are"
        )
    chosen = get_default_recipe() if given["recipe"] is None else given["recipe"]
    settings = Settings(
        num_warmup_iters, allow_unused_input, pool, retain_graph_in_backward,
        clone_param_grads_on_return, pre_warmup_hook, post_warmup_hook,
    )  # fmt: skip

    def follow(number: int) -> Callable:
        module = several[number]

        def call(*args: Any, **kwargs: Any) -> Any:
            with autocast(
                each[number], bool(given["calibrating"]), chosen, given["amax_reduction_group"]
            ):
                return module(*args, **kwargs)

        return call

    passes = [
        Pass(several[number], follow(number), args, some, hooks[number], settings)
        for number, args, some in zip(of, sample_args, kwargs)
    ]
    with _OneStep(several) as step:
        capture(passes, events, settings, step.begin)
    caches = bool(given["cache_quantized_params"])
    made = tuple(_finished(one, step.delayed, caches, _order is None) for one in passes)
    return made if isinstance(modules, tuple) else made[0]


def _check(modules: Tuple, args: Sequence, kwargs: Sequence, hooks: Sequence) -> None:
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"modules: graphs of {type(module).__name__} are not supported here")
        of = (module._forward_hooks, module._forward_pre_hooks)
        if any((*of, module._backward_hooks, module._backward_pre_hooks)):
            raise RuntimeError(
                f"{type(module).__name__} has hooks: register them after make_graphed_callables, "
                "or give them as capture_time_hooks, which are not in the graph"
            )
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise RuntimeError(f"{type(module).__name__}: a buffer requires a gradient")
        if any(isinstance(one, Follows) and one.need_backward_dw() for one in module.modules()):
            raise NotImplementedError(
                "te.make_graphed_callables: delay_wgrad_compute is not supported here in graphs"
            )
    if len({module.training for module in modules}) > 1:
        raise RuntimeError("modules: all of them train, or all of them evaluate")
    if len(kwargs) != len(args):
        raise ValueError(f"sample_kwargs: expected {len(args)}, as sample_args, got {len(kwargs)}")
    if len(hooks) != len(modules):
        raise ValueError(
            f"capture_time_hooks: expected {len(modules)}, one for each module, got {len(hooks)}"
        )
    unknown = {kind for of in hooks for kind in of or {}} - set(HOOKS)
    if unknown:
        got = ", ".join(sorted(unknown))
        raise ValueError(f"capture_time_hooks: expected {', '.join(HOOKS)}, got {got}")
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        raise RuntimeError("torch.autocast keeps copies of weights: give it cache_enabled=False")


def _scales(module: Any) -> List[Tuple[str, Scale]]:
    kept = getattr(module, "delayed", None) if isinstance(module, Delays) else None
    named = () if kept is None else kept.named_children()
    return [(name, scale) for name, scale in named if isinstance(scale, Scale)]


def _all(modules: Tuple) -> List[torch.nn.Module]:
    return list(dict.fromkeys(one for module in modules for one in module.modules()))


class _Read:
    """The scale of a forward pass as a graph reads it: a copy, since scales move on when a region
    is left, and the backward pass may compute the forward pass again. The codes of a weight that is
    quantized once for several micro-batches keep the scale, and the amax, of the first.
    """

    def __init__(self, name: str, live: Scale) -> None:
        self.of_weight = name.removesuffix("_row").removesuffix("_column").endswith("weight")
        self.live, self.copy, self.amax = live, live.scale.clone(), live.history[:1].clone()

    def exchange(self) -> None:
        """Exchanges the scale and its copy."""
        self.live.scale, self.copy = self.copy, self.live.scale

    @torch.no_grad()
    def begin(self, kept: bool) -> None:
        """Before a pass; ``kept`` says that weights are those of the micro-batch before."""
        if kept and self.of_weight:
            self.amax.copy_(self.live.history[:1])
        else:
            self.copy.copy_(self.live.scale)

    @torch.no_grad()
    def end(self, kept: bool) -> None:
        """After it."""
        if kept and self.of_weight:
            self.live.history[:1].copy_(self.amax)


class _Delayed(NamedTuple):
    """A module that took part in the step of a capture, and the scales that its graph reads."""

    module: Follows
    reads: List[_Read]


class _OneStep:
    """One step of delayed scaling, which leaves no trace: histories and scales are what they were,
    in the memory that graphs read.
    """

    def __init__(self, modules: Tuple) -> None:
        self.follow = [one for one in _all(modules) if isinstance(one, Follows)]
        self.steps = [one._step for one in self.follow]
        self.step, self.reads, self.delayed = Step(), {}, []  # type: ignore[var-annotated]
        self.before = {
            scale: (scale.scale.clone(), scale.history.clone())
            for one in self.follow
            for _, scale in _scales(one)
        }

    def begin(self, which: str) -> None:
        """Before a pass is captured. What a backward pass computes again was noted already."""
        if not self.reads:
            self._read_copies()
        self.step.ended = False
        if which == "backward":
            self.step._ended.add("forward")

    def _read_copies(self) -> None:
        """From now on, modules read copies of the scales that they have by now."""
        for one in self.follow:
            forward = [scale for scale in _scales(one) if pass_of(scale[0]) == "forward"]
            self.reads[one] = [_Read(*scale) for scale in forward]
            for read in self.reads[one]:
                read.exchange()
                read.live.before = read.live.scale

    def __enter__(self) -> "_OneStep":
        for one in self.follow:
            one._step = None  # or their steps would end in this one
        self.step.wait()
        self.region = _inside(region()._replace(step=self.step))
        self.region.__enter__()
        return self

    @torch.no_grad()
    def __exit__(self, *failed: Any) -> None:
        self.region.__exit__(None, None, None)
        self.step.ended = True
        for reads in self.reads.values():
            for read in reads:
                read.exchange()
                read.live.before = None
        for one, earlier in zip(self.follow, self.steps):
            if one._step is self.step:
                self.delayed.append(_Delayed(one, self.reads.get(one, [])))
            one._step = earlier
            for _, scale in _scales(one):
                number, history = self.before.get(scale) or (None, None)
                scale.scale.copy_(torch.ones(1) if number is None else number)
                scale.history.copy_(torch.zeros(1) if history is None else history)


def _finished(one: Pass, delayed: List[_Delayed], caches: bool, in_place: bool) -> Any:
    """A pass as a function or, in place, as its module."""
    module, original = one.module, one.module.forward
    own = {name: value for name, value in module.__dict__.items() if name in ("forward", "reset")}
    follow = [part for part in module.modules() if isinstance(part, Follows)]
    layers = [part for part in follow if isinstance(part, Layer)]
    counted = [of for of in delayed if of.module in follow]
    reads = [read for of in counted for read in of.reads]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training is not one.training:
            return original(*args, **kwargs)
        first = kwargs.pop("is_first_microbatch", None)
        if caches and not isinstance(first, bool):
            raise ValueError("is_first_microbatch: with cache_quantized_params each call gives it")
        for layer in layers:
            layer._first_of(first)
        here, kept = region(), caches and first is False
        counts = here.step is not None and here.asked is not None
        for of in counted if counts else ():
            of.module._begin(here, here.step)  # type: ignore[arg-type]
        for read in reads:
            read.begin(kept)
        made = one(*args, **kwargs)
        for read in reads:
            read.end(kept)
        outputs = [value for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        for of in counted if counts and outputs else ():
            here.step.watch(of.module.delayed, outputs[0])  # type: ignore[union-attr]
        return made

    def reset() -> None:
        one.reset()
        for name in ("forward", "reset"):
            module.__dict__.pop(name, None)
        module.__dict__.update(own)  # what others had put there

    if not in_place:
        forward.__dict__["reset"] = one.reset
        return forward
    module.__dict__.update(forward=forward, reset=reset)
    return module


def _renamed(given: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments with what was given under old names, of which it warns."""
    for old, new in _OLD.items():
        if given[old] is None:
            continue
        if given[new] is not None:
            raise ValueError(
                f"make_graphed_callables: {old} is the old name of {new}; give one of them"
            )
        warnings.warn(
            f"make_graphed_callables: {old} is deprecated, use {new}",
            DeprecationWarning,
            stacklevel=4,
        )
        given[new] = given[old]
    return given

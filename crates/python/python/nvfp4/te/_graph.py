"""CUDA graphs of modules, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch

from nvfp4.torch._delayed import Delays, Scale
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
    with _one_step(several) as delayed:
        capture(passes, events, settings)
    caches = bool(given["cache_quantized_params"])
    made = tuple(_finished(one, delayed, caches, _order is None) for one in passes)
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


def _scales(modules: Tuple) -> Iterator[Scale]:
    for one in _all(modules):
        kept = getattr(one, "delayed", None) if isinstance(one, Delays) else None
        if kept is not None:
            yield from (scale for scale in kept.children() if isinstance(scale, Scale))


def _all(modules: Tuple) -> List[torch.nn.Module]:
    return list(dict.fromkeys(one for module in modules for one in module.modules()))


@contextlib.contextmanager
def _one_step(modules: Tuple) -> Iterator[List[Follows]]:
    """One step of delayed scaling, which leaves no trace: histories and scales are what they were,
    in the memory that graphs read. Gives the modules that took part in it, when it is over.
    """
    follow = [one for one in _all(modules) if isinstance(one, Follows)]
    steps = [one._step for one in follow]
    before = {scale: (scale.scale.clone(), scale.history.clone()) for scale in _scales(modules)}
    step, took_part = Step(), []  # type: ignore[var-annotated]
    for one in follow:
        one._step = None  # or their steps would end in this one
    try:
        with _inside(region()._replace(step=step)):
            yield took_part
    finally:
        step.ended = True
        took_part += [one for one in follow if one._step is step]
        for one, earlier in zip(follow, steps):
            one._step = earlier
        with torch.no_grad():
            for scale in _scales(modules):
                number, history = before.get(scale, (1.0, 0.0))
                scale.scale.copy_(torch.as_tensor(number))
                scale.history.copy_(torch.as_tensor(history))


def _finished(one: Pass, delayed: List[Follows], caches: bool, in_place: bool) -> Any:
    """A pass as a function or, in place, as its module."""
    module, original = one.module, one.module.forward
    own = {name: value for name, value in module.__dict__.items() if name in ("forward", "reset")}
    follow = [part for part in module.modules() if isinstance(part, Follows)]
    layers = [part for part in follow if isinstance(part, Layer)]
    counted = [part for part in follow if part in delayed]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training is not one.training:
            return original(*args, **kwargs)
        first = kwargs.pop("is_first_microbatch", None)
        if caches and not isinstance(first, bool):
            raise ValueError("is_first_microbatch: with cache_quantized_params each call gives it")
        for layer in layers:
            layer._first_of(first)
        here = region()
        if here.step is not None and here.asked is not None:
            for part in counted:
                part._begin(here, here.step)
        return one(*args, **kwargs)

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

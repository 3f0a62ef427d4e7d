"""CUDA graphs of modules, under TransformerEngine's names."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from ._quantized_attention import SLOTS
from ._recipe import autocast, get_default_recipe
from ._signature import supports
from .recipe import of as recipe_of

_OLD = {
    "fp8_enabled": "enabled", "fp8_calibrating": "calibrating", "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group", "fp8_weight_caching": "cache_quantized_params",
}  # fmt: skip
# The tensors of linear layers and of attention.
_TENSORS = ("input", "weight", "grad_output", *SLOTS)


@supports(
    "num_warmup_iters", "allow_unused_input", "fp8_enabled", "fp8_calibrating", "fp8_recipe", "fp8_group",
    "fp8_weight_caching", "enabled", "calibrating", "recipe", "amax_reduction_group", "cache_quantized_params", "pool",
)  # fmt: skip
def make_graphed_callables(
    modules: Union[Callable, Tuple[Callable, ...]], sample_args: Tuple, num_warmup_iters: int = 3,
    allow_unused_input: bool = False, sample_kwargs: Any = None, fp8_enabled: Any = None,
    fp8_calibrating: Optional[bool] = None, fp8_recipe: Any = None, fp8_group: Any = None,
    fp8_weight_caching: Optional[bool] = None, enabled: Any = None, calibrating: Optional[bool] = None, recipe: Any = None,
    amax_reduction_group: Any = None, cache_quantized_params: Optional[bool] = None, _order: Optional[List[int]] = None,
    _num_layers_per_chunk: Optional[List[int]] = None, pool: Any = None, retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False, clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Optional[Callable] = None, post_warmup_hook: Optional[Callable] = None,
    capture_time_hooks: Optional[List[Optional[Dict[str, Dict]]]] = None,
) -> Any:  # fmt: skip
    """``torch.cuda.make_graphed_callables`` for modules that follow ``autocast``: the graphs are
    those of this recipe.

    Weights are quantized in the graph at every call, whatever ``cache_quantized_params`` says.
    Recipes with delayed scaling are refused: regions count their steps, and a graph is in none.
    """
    given = _renamed(locals())
    on = given["enabled"]
    several = modules if isinstance(modules, tuple) else (modules,)
    each = on if isinstance(on, tuple) else (bool(on),) * len(several)
    if len(each) != len(several):
        raise ValueError(
            f"enabled: expected one answer or {len(several)}, one for each module, got {len(each)}"
        )
    chosen = get_default_recipe() if given["recipe"] is None else given["recipe"]
    if any(each) and any("delayed" in recipe_of(chosen).spec("any", slot) for slot in _TENSORS):
        raise NotImplementedError(
            "te.make_graphed_callables: delayed scaling counts its steps outside of graphs; use Float8CurrentScaling"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "make_graphed_callables captures CUDA graphs, and torch sees no GPU here; on the CPU call the modules as they are"
        )

    def capture(modules: Any, sample_args: Any, enabled: bool) -> Any:
        with autocast(enabled, bool(given["calibrating"]), chosen, given["amax_reduction_group"]):
            made = torch.cuda.make_graphed_callables(
                modules, sample_args, num_warmup_iters, allow_unused_input, pool
            )
        return tuple(map(_finished, made)) if isinstance(made, tuple) else _finished(made)

    if len(set(each)) == 1:
        return capture(modules, sample_args, each[0])
    return tuple(capture(*one) for one in zip(several, sample_args, each))


def _finished(graphed: Any) -> Any:
    """What was captured, with ``reset()``, which lets go of the graphs, and with
    ``is_first_microbatch`` as an argument, which says nothing where weights are quantized at every
    call.
    """
    is_module = isinstance(graphed, torch.nn.Module)
    replay = graphed.forward if is_module else graphed

    def forward(*args: Any, is_first_microbatch: Optional[bool] = None, **kwargs: Any) -> Any:
        return replay(*args, **kwargs)

    def reset() -> None:
        for name in ("forward", "reset"):
            graphed.__dict__.pop(name, None)

    (graphed if is_module else forward).__dict__["reset"] = reset
    if not is_module:
        return forward
    graphed.__dict__["forward"] = forward
    return graphed


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

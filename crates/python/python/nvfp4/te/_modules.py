"""Modules under TransformerEngine's names, which follow ``autocast``."""

from __future__ import annotations

import threading
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

import nvfp4
import nvfp4.torch
from nvfp4.torch._delayed import update
from nvfp4.torch._layer import Workers

from ._recipe import Region, Step, region
from ._signature import refuse, supports

# Guards what several threads may change in a module: what it remembers of its calls.
_lock = threading.RLock()
# What ``use_recipe`` sets, in one kind of module or another.
_PLANNED = ("formats", "fc1_formats", "fc2_formats", "_products")
# How many recipes a module keeps the formats of.
_AT_HAND = 4
# What a module remembers of its calls, which is no part of what is saved or copied.
_REMEMBERED = ("_plans", "_ran", "_repeated", "_regional", "_compiled", "_step")


# What a compiler says that needs one graph and meets what cannot be in it.
_WHY = (
    "delayed scaling counts its steps outside of graphs, and so do calls outside of all regions once a module was "
    "called in one; enter te.autocast around the compiled call, te.autocast(enabled=False) for high precision"
)


def _outside_of_graphs(function):
    try:
        return torch.compiler.disable(function, reason=_WHY)
    except TypeError:  # older versions of torch take no reason
        return torch.compiler.disable(function)


class _Planned(NamedTuple):
    """What a recipe sets in a module, and whether a scale comes from earlier steps."""

    sets: Dict[str, Any]
    delayed: bool


class _Follows(torch.nn.Module):
    """A module that computes in the formats of the ``autocast`` around its call, and in high
    precision outside of one.

    What a call computes in belongs to the call: threads may call one module in different regions.
    In a backward pass a module computes again what it computed before, so there it follows the
    region of that call.
    """

    use_recipe: Callable[[Any], None]
    forget_weights: Callable[[], None]
    path: str
    delayed: Any
    # By the keys of regions: what their recipes set; the latest first.
    _plans: Dict[str, _Planned] = {}
    # The regions, each with another recipe, of calls that a backward pass may repeat, the latest
    # last; and whether one has.
    _ran: Tuple[Region, ...] = ()
    _repeated: bool = False
    # The region of the last compiled call, if it is not among these yet.
    _compiled: Optional[Region] = None
    # Whether any call was in a region.
    _regional: bool = False
    # The step of delayed scaling that it was last part of.
    _step: Optional[Step] = None

    def __getstate__(self):
        # The next call finds out what to follow.
        return {name: value for name, value in self.__dict__.items() if name not in _REMEMBERED}

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        # TransformerEngine keeps the state of its recipes under this name, in a form of its own.
        key = f"{prefix}_extra_state"
        if key in unexpected:
            unexpected.remove(key)

    def following(self):
        """This module as the region around the call has it: with the formats and the workers of
        this call, and everything else in common.
        """
        return self._traced() if torch.compiler.is_compiling() else self._twin()

    def _traced(self):
        """The same in a graph, which is that of this region's recipe. A compiler sees what is
        assigned here in this call alone.
        """
        self._plan_ahead()
        here = region()
        planned = self._plans[here.key]
        # Steps of delayed scaling are counted call by call. A call outside of all regions may be
        # one that a backward pass repeats, which no graph can tell.
        if planned.delayed or (self._regional and not here.key):
            return self._kept_from_compilers()
        if here.key:
            self._compiled = here
        for name, value in planned.sets.items():
            setattr(self, name, value)
        self._workers = None if here.group is None else Workers(here.group)
        return self

    @torch.compiler.assume_constant_result
    def _plan_ahead(self) -> None:
        """Makes the plan of a region at hand while a compiler looks at the call."""
        here = region()
        self._planned(here)
        self._regional = self._regional or bool(here.key)

    @_outside_of_graphs
    def _kept_from_compilers(self):
        return self._twin()

    def _follow(self, is_first_microbatch: Optional[bool]):
        """:meth:`following`, where the first of several micro-batches has new weights. Without a
        word, or later, they are quantized again if they were changed.
        """
        if is_first_microbatch:
            self.forget_weights()
        return self.following()

    def _twin(self):
        here = self._followed()
        planned = self._planned(here)
        if here.step is not None and planned.delayed:
            self._begin(here, here.step)
        # Neither is a parameter or a module, for which an assignment would look.
        workers = None if here.group is None else Workers(here.group)
        same = object.__new__(type(self))
        same.__dict__.update(self.__dict__, **planned.sets, _workers=workers)
        return same

    def _followed(self) -> Region:
        here = region()
        with _lock:
            if self._compiled is not None:
                self.__dict__.update(_ran=self._remembered(self._compiled), _repeated=False, _compiled=None)
        if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
            with _lock:
                self.__dict__.update(_ran=self._remembered(here), _repeated=False)
                self._regional = self._regional or bool(here.key)
            return here
        with _lock:
            ran, self._repeated = self._ran, True
        if not ran or (here.step is not None and any(before.recipe == here.recipe for before in ran)):
            return here
        if len(ran) > 1:
            names = ", ".join(before.recipe.name for before in ran)
            warnings.warn(
                f"{type(self).__name__} '{self.path}' is computed again in the backward pass, outside of the autocast of its call. It was "
                f"called with several recipes ({names}): the last one is taken. te.checkpoint, in the place of "
                "torch.utils.checkpoint.checkpoint, repeats each call with its own",
                RuntimeWarning,
                stacklevel=4,
            )
        return ran[-1]

    def _remembered(self, here: Region) -> Tuple[Region, ...]:
        """The regions that a backward pass may repeat after a call in this one."""
        only_outside = here.step is not None and all(before.step is None for before in self._ran)
        if self._repeated or only_outside:
            return (here,)
        return (*(before for before in self._ran if before.recipe != here.recipe), here)

    def _planned(self, here: Region) -> _Planned:
        """What the recipe sets."""
        planned = self._plans.get(here.key)
        if planned is not None:
            return planned
        with _lock:
            if self._step is not None and self._step is not here.step:
                self._step.end()  # while its scales are there: another recipe may need other ones
            self.use_recipe(here.recipe)
            sets = {name: self.__dict__[name] for name in _PLANNED if name in self.__dict__}
            planned = _Planned(sets, _is_delayed(sets))
            # Scales that a module keeps are those of one recipe.
            kept = [item for item in self._plans.items() if not (planned.delayed and item[1].delayed)]
            self._plans = dict([(here.key, planned), *kept[: _AT_HAND - 1]])
            return planned

    def _begin(self, here: Region, step: Step) -> None:
        """Takes part in a step of delayed scaling. The one before ends with it."""
        with _lock:
            before, self._step = self._step, step
        if before is step:
            return
        if before is not None:
            before.end()
        else:
            update([(self, here.group)])  # what it saw before it was saved or copied, if it was
        step.modules[id(self)] = (self, here.group)


def _is_delayed(planned: Dict[str, Any]) -> bool:
    """Whether a scale comes from earlier steps."""
    named = [value for name, value in planned.items() if name.endswith("formats")]
    each = [formats for value in named for formats in (value if isinstance(value, list) else [value])]
    return any(format.delayed for of in each for format in (of.input, of.weight, of.grad_output))


class Linear(_Follows, nvfp4.torch.Linear):
    """``transformer_engine.pytorch.Linear``."""

    @supports("bias", "params_dtype", "device", "name")
    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
        tp_group=None, tp_size: int = 1, get_rng_state_tracker=None, rng_tracker_name: Optional[str] = None, init_method=None,
        bias: bool = True, return_bias: bool = False, params_dtype: Optional[torch.dtype] = None,
        parallel_mode: Optional[str] = None, parameters_split=None, device=None, ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_name: Optional[str] = None, delay_wgrad_compute: bool = False, symmetric_ar_type: Optional[str] = None,
        save_original_input: bool = False, name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(
            in_features, out_features, bias=bias, device=device, dtype=params_dtype,
            recipe="high_precision", path=name or "linear",
        )  # fmt: skip

    # The arguments are TransformerEngine's.
    def forward(  # type: ignore[override]
        self, inp: Tensor, is_first_microbatch: Optional[bool] = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        refuse("Linear.forward", "fp8_output", fp8_output, False)
        refuse("Linear.forward", "fp8_grad", fp8_grad, False)
        return super(Linear, self._follow(is_first_microbatch)).forward(inp)


class LayerNormLinear(_Follows, nvfp4.torch.LayerNormLinear):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    @supports("eps", "bias", "normalization", "params_dtype", "device", "name")
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group=None, tp_size: int = 1, get_rng_state_tracker=None, init_method=None,
        bias: bool = True, normalization: str = "LayerNorm", return_bias: bool = False,
        params_dtype: Optional[torch.dtype] = None, parallel_mode: Optional[str] = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, parameters_split=None, zero_centered_gamma: bool = False, device=None,
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_name: Optional[str] = None, delay_wgrad_compute: bool = False,
        symmetric_ar_type: Optional[str] = None, name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(
            in_features, out_features, eps=eps, bias=bias, normalization=normalization, device=device, dtype=params_dtype,
            recipe="high_precision", path=name or "layernorm_linear",
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self, inp: Tensor, is_first_microbatch: Optional[bool] = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        refuse("LayerNormLinear.forward", "fp8_output", fp8_output, False)
        refuse("LayerNormLinear.forward", "fp8_grad", fp8_grad, False)
        return super(LayerNormLinear, self._follow(is_first_microbatch)).forward(inp)


class LayerNormMLP(_Follows, nvfp4.torch.LayerNormMLP):
    """``transformer_engine.pytorch.LayerNormMLP``."""

    @supports("eps", "bias", "normalization", "activation", "params_dtype", "device", "name")
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False, return_bias: bool = False,
        get_rng_state_tracker=None, tp_group=None, tp_size: int = 1, init_method=None, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", activation_params=None, output_layer_init_method=None,
        fuse_wgrad_accumulation: bool = False, params_dtype: Optional[torch.dtype] = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, seq_length: Optional[int] = None, micro_batch_size: Optional[int] = None,
        set_parallel_mode: bool = False, zero_centered_gamma: bool = False, device=None, ub_overlap_ag: bool = False,
        name: Optional[str] = None, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False, delay_wgrad_compute: bool = False, symmetric_ar_type: Optional[str] = None,
        checkpoint: bool = False,
    ):  # fmt: skip
        super().__init__(
            hidden_size, ffn_hidden_size, eps=eps, bias=bias, normalization=normalization, activation=activation,
            device=device, dtype=params_dtype, recipe="high_precision", path=name or "layernorm_mlp",
        )  # fmt: skip

    def forward(self, inp: Tensor, is_first_microbatch: Optional[bool] = None) -> Tensor:  # type: ignore[override]
        return super(LayerNormMLP, self._follow(is_first_microbatch)).forward(inp)


class GroupedLinear(_Follows, nvfp4.torch.GroupedLinear):
    """``transformer_engine.pytorch.GroupedLinear``."""

    @supports("bias", "params_dtype", "device", "name")
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group=None, tp_size: int = 1, get_rng_state_tracker=None,
        rng_tracker_name: Optional[str] = None, init_method=None, bias: bool = True, return_bias: bool = False,
        params_dtype: Optional[torch.dtype] = None, parallel_mode: Optional[str] = None, device=None, ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False, ub_name: Optional[str] = None, delay_wgrad_compute: bool = False,
        save_original_input: bool = False, single_grouped_weight: bool = False, single_grouped_bias: bool = False,
        name: Optional[str] = None, use_grouped_tensor: Optional[bool] = None,
    ):  # fmt: skip
        super().__init__(
            num_gemms, in_features, out_features, bias=bias, device=device, dtype=params_dtype,
            recipe="high_precision", path=name or "grouped_linear",
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self, inp: Tensor, m_splits: List[int], is_first_microbatch: Optional[bool] = None, out=None, dgrad_out=None
    ) -> Tensor:
        refuse("GroupedLinear.forward", "out", out, None)
        refuse("GroupedLinear.forward", "dgrad_out", dgrad_out, None)
        return super(GroupedLinear, self._follow(is_first_microbatch)).forward(inp, m_splits)

"""What modules under TransformerEngine's names have in common: they follow ``autocast``."""

from __future__ import annotations

import threading
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

import nvfp4
from nvfp4.torch._composed import amax_of
from nvfp4.torch._delayed import update
from nvfp4.torch._layer import Workers
from nvfp4.torch._quantized import coded as coded_of

from ._algorithms import follow_algorithms
from ._checks import refuse_original_input, validate_experts, warn_of_original_input
from ._codes import bind_codes
from ._extra_state import load_extra_state
from ._later import Postpones, computed_again
from ._meta import ShowsQuantizers
from ._products import foreign_linear, is_foreign
from ._recipe import Region, Step, in_backward, number_in_graph, numbered, region
from ._settable import Settable
from .recipe import Recipe

# Guards what several threads may change in a module: what it remembers of its calls.
_lock = threading.RLock()
# What ``use_recipe`` sets, in one kind of module or another.
_PLANNED = ("formats", "fc1_formats", "fc2_formats", "_products", "_foreign")
_PLAIN = nvfp4.Recipe("high_precision")
# How many recipes a module keeps the formats of.
_AT_HAND = 4
# What a module remembers of its calls, which is no part of what is saved or copied.
_REMEMBERED = ("_plans", "_ran", "_repeated", "_regional", "_compiled", "_step", "_foreign", "_asked", "_shown", "_stale")
# What a recipe sets, for the region with a number inside of a compiler's graph.
_OF_GRAPH = "_of_graph_"

# What a compiler says that needs one graph and meets what cannot be in it.
_WHY = (
    "delayed scaling counts its steps outside of graphs, and so do calls outside of all regions once a module was "
    "called in one; enter te.autocast around the compiled call, te.autocast(enabled=False) for high precision"
)


def outside_of_graphs(why: str):
    """Keeps a function from compilers, which say why."""

    def kept(function):
        try:
            return torch.compiler.disable(function, reason=why)
        except TypeError:  # older versions of torch take no reason
            return torch.compiler.disable(function)

    return kept


class _Planned(NamedTuple):
    """What a recipe sets in a module, and whether a scale comes from earlier steps."""

    sets: Dict[str, Any]
    delayed: bool


class TheirState(Settable):
    """A module that loads a state dict of TransformerEngine's."""

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        # TransformerEngine keeps the state of its recipes under this name, in a form of its own.
        key = f"{prefix}_extra_state"
        if key in unexpected:
            unexpected.remove(key)
            load_extra_state(self, state_dict[key])


class Follows(Postpones, ShowsQuantizers, TheirState):
    """A module that computes in the formats of the ``autocast`` around its call, and in high
    precision outside of one.

    What a call computes in belongs to the call: threads may call one module in different regions.
    In a backward pass a module computes again what it computed before, so there it follows the
    region of that call.
    """

    use_recipe: Callable[[Any], None]
    forget_weights: Callable[[], None]
    fuse_wgrad_accumulation: bool
    # Whether the backward pass is to make what it reads of the input again. It keeps the codes.
    save_original_input: bool = False
    path: str
    _products: Any
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
    _workers: Optional[Workers] = None
    # The products of the recipe that this call is calibrated for.
    _calibrated: Any = None
    # What attention hands over in the region of this call.
    _hand_over: str = "none"
    # The step of delayed scaling that it was last part of, and the one that this call is part of.
    _step: Optional[Step] = None
    _steps: Optional[Step] = None
    # For each product: its quantizers, if one of them brings its own product.
    _foreign: Optional[List[Optional[Dict[str, Any]]]] = None

    def __getstate__(self):
        # The next call finds out what to follow.
        kept = self.__dict__.items()
        return {name: value for name, value in kept if name not in _REMEMBERED and not name.startswith(_OF_GRAPH)}

    def following(self):
        """This module as the region around the call has it: with the formats and the workers of
        this call, and everything else in common.
        """
        return self._traced() if torch.compiler.is_compiling() else self._twin()

    def _traced(self):
        """The same in a graph, which is that of this region's recipe. A compiler sees what is
        assigned here in this call alone.
        """
        here, number = region(), number_in_graph()
        self._plan_ahead(number)
        planned = self._plans[here.key] if number is None else getattr(self, f"{_OF_GRAPH}{number}")
        # Steps of delayed scaling are counted call by call. A call outside of all regions may be
        # one that a backward pass repeats, which no graph can tell.
        if here.calibrating or planned.delayed or (self._regional and not here.key):
            return self._kept_from_compilers()
        if here.key:
            self._compiled = here
        for name, value in planned.sets.items():
            setattr(self, name, value)
        self._workers = None if here.group is None else Workers(here.group)
        self._hand_over = here.hand_over
        return self

    @torch.compiler.assume_constant_result
    def _plan_ahead(self, number: Optional[int]) -> None:
        """Makes the plan of a region at hand while a compiler looks at the call. Those of regions
        inside of its graph are attributes: what comes into a dictionary that it saw is not seen.
        """
        here = region() if number is None else numbered(number)
        planned = self._planned(here)
        self._regional = self._regional or bool(here.key)
        if number is not None:
            self.__dict__[f"{_OF_GRAPH}{number}"] = planned

    @outside_of_graphs(_WHY)
    def _kept_from_compilers(self):
        return self._twin()

    def _follow(self, is_first_microbatch: Optional[bool]):
        """:meth:`following`, where the first of several micro-batches has new weights, and its
        gradients are the first in ``main_grad``. Without a word, or later, weights are quantized
        again if they were changed, and gradients are added. So are they without a word, if scales
        of delayed scaling moved on.
        """
        self._first_of(is_first_microbatch)
        return self.following()

    def _first_of(self, is_first_microbatch: Optional[bool]) -> None:
        if is_first_microbatch or (is_first_microbatch is None and self._scales_moved()):
            self.forget_weights()
        if is_first_microbatch:
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
                for weight in self._parameters.values():
                    if weight is not None and weight.requires_grad and hasattr(weight, "main_grad"):
                        weight.main_grad.zero_()  # type: ignore[operator]

    def _scales_moved(self) -> bool:
        """Whether codes of weights may have a scale of earlier steps. A graph keeps none."""
        if torch.compiler.is_compiling() or self._step is None:
            return False
        return self._step.moved

    def _twin(self):
        here = self._followed()
        planned = self._planned(here)
        if self.save_original_input and planned.delayed and torch.is_grad_enabled():
            refuse_original_input(self.path, here.asked)
        if here.step is not None and planned.delayed and not (self._step and in_backward()):
            self._begin(here, here.step)
        sets, calibrated = planned.sets, None
        if here.calibrating:
            outside = Region(_PLAIN, step=here.step, key=_PLAIN.name)
            sets, calibrated = self._planned(outside).sets, sets.get("_products")
        # Neither is a parameter or a module, for which an assignment would look.
        workers = None if here.group is None else Workers(here.group)
        same = object.__new__(type(self))
        same.__dict__.update(
            self.__dict__, **sets, _workers=workers, _hand_over=here.hand_over,
            _calibrated=calibrated, _steps=self._step if planned.delayed else None,
        )  # fmt: skip
        return same

    def product(
        self, x: Any, weight: Any, bias: Any, number: int = 0, handed: Any = None, store: Any = None
    ) -> Any:
        """``x·wᵀ + bias`` in the formats of the product with this number. Where a recipe is
        calibrated, delayed scaling sees the operands.
        """
        if self._calibrated is not None:
            prefix, _, formats = self._calibrated[number]
            state = self.state_of(formats, prefix)  # type: ignore[operator]
            for kept, operand in ((state.input, x), (state.weight, weight)):
                if kept is not None:
                    kept.note([amax_of(operand)] * kept.number())
        y = self._product_now_or_later(x, weight, bias, number, handed, store)
        return self._watched(y)

    def _watched(self, y: Any) -> Any:
        """The same result, whose backward pass ends a step of delayed scaling."""
        if self._steps is not None:
            self._watch(y)
        return y

    @outside_of_graphs(_WHY)
    def _watch(self, y: Any) -> None:
        assert self._steps is not None
        self._steps.watch(self.delayed, y)

    def _repeats(self) -> bool:
        if self._steps is None or torch.compiler.is_compiling():
            return False
        return self._steps.moved and in_backward() and self._steps.saw(self)

    def _product_now_or_later(
        self, x: Any, weight: Any, bias: Any, number: int, handed: Any, store: Any
    ) -> Any:
        waits = self._store is not None and torch.is_grad_enabled() and weight.requires_grad
        if not waits:
            return self._product(x, weight, bias, number, handed, store)
        plain = self._foreign is None and weight.is_leaf and coded_of(weight) is None
        if plain:
            return self._product(x, weight, bias, number, handed, self._store)

        def again(x: Any, weight: Any, bias: Any) -> Any:
            return self._product(x, weight, bias, number, handed)

        return computed_again(self._store, again, x, weight, bias)  # type: ignore[arg-type]

    def _product(
        self, x: Any, weight: Any, bias: Any, number: int, handed: Any, store: Any = None
    ) -> Any:
        foreign = None if self._foreign is None else self._foreign[number]
        if foreign is not None and number in self._parallel:  # type: ignore[operator]
            raise NotImplementedError(
                f"{self.path}: a quantizer that brings its own product cannot be used with tensor "
                "parallelism; leave out tp_size"
            )
        if foreign is not None:
            return foreign_linear(x, weight, bias, foreign)
        return super().product(x, weight, bias, number, handed, store)  # type: ignore

    def _followed(self) -> Region:
        here = region()
        with _lock:
            if self._compiled is not None:
                self.__dict__.update(_ran=self._remembered(self._compiled), _repeated=False, _compiled=None)
        if not in_backward():
            with _lock:
                self.__dict__.update(_ran=self._remembered(here), _repeated=False)
                if isinstance(here.asked, Recipe):  # a preset's name has no quantizers to show
                    self._notice(here.asked)
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

    def _notice(self, asked: Any) -> None:
        """Warns of a recipe of another kind than that of the call before."""
        before, self.__dict__["_asked"] = self._asked, asked
        if before is not None and not isinstance(asked, type(before)) and not isinstance(before, type(asked)):
            kinds = f"from {type(before).__name__} to {type(asked).__name__}"
            warnings.warn(f"Recipe type changed {kinds} in '{self.path}'", stacklevel=6)

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
                # While its scales are there: another recipe may need other ones.
                self._step.end_before_another()
            self._use(here)
            self._check_codes(here)
            self._ask_about_edges(here.asked)
            self.__dict__["_foreign"] = self._foreign_of(here)
            sets = {name: self.__dict__[name] for name in _PLANNED if name in self.__dict__}
            planned = _Planned(sets, _is_delayed(sets))
            # Scales that a module keeps are those of one recipe.
            kept = [item for item in self._plans.items() if not (planned.delayed and item[1].delayed)]
            self._plans = dict([(here.key, planned), *kept[: _AT_HAND - 1]])
            return planned

    def _use(self, here: Region) -> None:
        """:meth:`use_recipe`, with what TransformerEngine says about quantizers of a factory."""
        answers = getattr(here.asked, "_answers", {})
        try:
            self.use_recipe(here.recipe)
        except ValueError:
            validate_experts({of: slots for of, slots in answers.items() if of[0] == self.path})
            raise
        if self.save_original_input and answers:
            warn_of_original_input(self.path, here.asked)

    def _check_codes(self, here: Region) -> None:
        """Refuses a recipe of another format than the weights that exist as codes alone."""
        for name, (_, _, formats) in zip(self.weights(), self._products):  # type: ignore[operator]
            quantizer = getattr(self._parameters.get(name), "_quantizer", None)
            there, asked = getattr(quantizer, "spec", str)(), formats.weight.spec
            if quantizer is None or "high-precision" in (there, asked):
                continue
            # Of the row direction: a recipe may leave the column direction in high precision.
            if there.split(" / ")[0].split("(")[0] != asked.split(" / ")[0].split("(")[0]:
                raise RuntimeError(
                    f"Recipe mismatch for '{name}' of {self.path}: its codes are {there}, and the recipe "
                    f"{type(here.asked).__name__} asks for {asked}; use one recipe in quantized_model_init and autocast"
                )

    def _foreign_of(self, here: Region) -> Optional[List[Optional[Dict[str, Any]]]]:
        """The quantizers of each product of which one brings its own product."""
        answers = getattr(here.asked, "_answers", None)
        if not answers:
            return None
        of: List[Optional[Dict[str, Any]]] = []
        for site in self.sites_of(self, self.path):  # type: ignore[operator]
            for expert in range(site[2]) if len(site) > 2 else (None,):
                quantizers = answers.get((site[0], expert), {})
                of.append(quantizers if any(map(is_foreign, quantizers.values())) else None)
        return of if any(of) else None

    def _begin(self, here: Region, step: Step) -> None:
        """Takes part in a step of delayed scaling. The one before ends with it."""
        with _lock:
            before, self._step = self._step, step
        if before is step:
            return
        if before is not None:
            before.end_before_another()
        else:
            update([(self, here.group)])  # what it saw before it was saved or copied, if it was
            self.forget_weights()
        step.modules[id(self)] = (self, here.group)
        bind_codes(self)
        follow_algorithms(self.delayed, here.asked)


def _is_delayed(planned: Dict[str, Any]) -> bool:
    """Whether a scale comes from earlier steps."""
    named = [value for name, value in planned.items() if name.endswith("formats")]
    each = [formats for value in named for formats in (value if isinstance(value, list) else [value])]
    return any(format.delayed for of in each for format in of.tensors)

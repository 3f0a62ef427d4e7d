"""``autocast`` and what modules follow in it, under TransformerEngine's names."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import warnings
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
import torch.utils.checkpoint

import nvfp4
from nvfp4.torch._delayed import update

from ._signature import refuse, supports
from .recipe import MXFP8BlockScaling, Recipe, hand_over_of
from .recipe import of as recipe_of


_numbers = itertools.count()


def in_backward() -> bool:
    """Whether a backward pass is under way."""
    return torch._C._current_graph_task_id() != -1


class Step:
    """An outermost region and the backward pass after it, as delayed scaling sees them.

    Scales of the forward pass move on when the region is left, those of the backward pass at the
    end of the pass that reaches the first module. A step that nobody ends so ends when one of its
    modules is used in another region.
    """

    def __init__(self) -> None:
        # Each with the workers that agree on its amaxes.
        self.modules: Dict[int, Tuple[Any, Any]] = {}
        # The passes that have ended.
        self._ended: Set[str] = set()
        # What the first module keeps, and whether its backward pass will end the step.
        self._first: Any = None
        self._watches = False
        # Whether another step ends it.
        self._waits = False
        # Whose amaxes were seen before the backward pass, by what they keep.
        self._seen: Set[int] = set()

    @property
    def ended(self) -> bool:
        """Whether both passes have ended. A step that is told so updates nothing more."""
        return self._ended == {"forward", "backward"}

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._ended = {"forward", "backward"} if ended else set()

    @property
    def moved(self) -> bool:
        """Whether the scales of its forward pass have moved on."""
        return "forward" in self._ended

    def wait(self) -> None:
        """Leaves its end to another step. So do graphs: what they compute again has the scales that
        are in memory, and they would replay the end.
        """
        self._waits = True

    def leave(self) -> None:
        """Ends the forward pass, where a region is left."""
        if not self._waits:
            self.end("forward")

    def end(self, which: str) -> None:
        """Updates the scales of a pass, "forward" or "backward", once."""
        if which not in self._ended:
            self._ended.add(which)
            update(self.modules.values(), (which,))
            if which == "backward":  # what a forward pass without gradients left to its repetition
                update([of for of in self.modules.values() if not self.saw(of[0])], ("forward",))

    def saw(self, module: Any) -> bool:
        """Whether it saw the amaxes of a module's forward pass before the backward pass."""
        return id(module.delayed) in self._seen

    def end_before_another(self) -> None:
        """Ends what has to end before one of its modules takes part in another step."""
        self.end("forward")
        if not self._watches:
            self.end("backward")

    def watch(self, kept: Any, y: torch.Tensor) -> None:
        """Ends the backward pass after that of ``y``, if it is the first module's, which keeps
        this.
        """
        self._first = kept if self._first is None else self._first
        if not y.requires_grad:
            return
        if not in_backward():
            self._seen.add(id(kept))
        if self._first is kept and not self._waits:
            self._watches = True
            y.register_hook(self._begins_backward)

    def _begins_backward(self, _: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.end("backward"))


class Told(NamedTuple):
    """What ``autocast`` was told, for programs that ask: nothing outside of one."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Any = None
    group: Any = None


class Region(NamedTuple):
    """What modules follow inside ``autocast``.

    ``key`` stands for the recipe, and is empty outside. Compilers compare it: to them, recipes and
    steps are objects that are new each time. ``hand_over`` says which tensors attention hands over
    quantized: "none", its "output", or "both" this and its gradients. ``calibrating`` says that
    modules compute in high precision, and note the amaxes that the recipe keeps.
    """

    recipe: nvfp4.Recipe
    group: Any = None
    step: Optional[Step] = None
    key: str = ""
    hand_over: str = "none"
    calibrating: bool = False
    # The recipe as it was given; None in high precision.
    asked: Any = None
    told: Told = Told()


# The last recipes that regions had, each with its key.
_keys: Deque[Tuple[nvfp4.Recipe, str]] = deque(maxlen=64)
_keys_lock = threading.Lock()


def _key(recipe: nvfp4.Recipe) -> str:
    """The key of a recipe: the same for equal ones, while they are among the last."""
    with _keys_lock:
        for known, key in _keys:
            if known is recipe or known == recipe:
                return key
        key = f"{recipe.name} {next(_numbers)}"
        _keys.append((recipe, key))
        return key


_HIGH_PRECISION = Region(nvfp4.Recipe("high_precision"))
_region: contextvars.ContextVar[Region] = contextvars.ContextVar("nvfp4_te_region", default=_HIGH_PRECISION)


# The regions that compiled functions enter themselves, which are the same in every call; and the
# numbers of those that a compiler is in. It follows what happens to the second list, which is empty
# whenever Python runs.
_of_graphs: List[Region] = []
_entered: List[int] = []


def region() -> Region:
    """What modules follow here."""
    number = number_in_graph()
    return _region.get() if number is None else numbered(number)


@torch.compiler.assume_constant_result
def numbered(number: int) -> Region:
    """The region with a number among those of graphs."""
    return _of_graphs[number]


def number_in_graph() -> Optional[int]:
    """The number of the region that a compiled function has entered, if it is in one."""
    return _entered[-1] if _entered else None


class autocast(contextlib.ContextDecorator):
    """Inside, modules compute in the formats of a recipe: one of this module's, an ``nvfp4.Recipe``
    or a preset's name; without one, :func:`get_default_recipe`'s.

    ``amax_reduction_group`` is the process group whose workers agree on amaxes. Scales of delayed
    scaling move on when the outermost region is left, and those of gradients at the end of the
    backward pass. With ``enabled=False, calibrating=True`` modules
    compute in high precision, and delayed scaling notes the amaxes of inputs and weights. A region
    belongs to the thread, or the task of
    ``asyncio``, that enters it: a thread that is started inside enters its own. It may be entered
    again after it was left.
    """

    @supports("enabled", "calibrating", "recipe", "amax_reduction_group")
    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:  # fmt: skip
        for name, given in (("enabled", enabled), ("calibrating", calibrating)):
            if isinstance(given, (str, Recipe, nvfp4.Recipe, torch.nn.Module)):
                raise TypeError(
                    f"{name}: expected True or False, got {type(given).__name__}; a recipe is the "
                    "argument recipe=, and modules are called inside of the region"
                )
        self._told = Told(bool(enabled), bool(calibrating), recipe, amax_reduction_group)
        self._token: Optional[contextvars.Token] = None

    def __enter__(self) -> "autocast":
        if torch.compiler.is_compiling() and _in_one_graph():
            _entered.append(_number(*self._told))
            return self
        if self._token is not None:
            raise RuntimeError("this autocast is entered already: make another one for a region inside of it")
        self._token = _region.set(_told(self._told, region().step or Step()))
        return self

    def __exit__(self, *_: Any) -> None:
        if torch.compiler.is_compiling() and _in_one_graph():
            _entered.pop()
            return
        token, self._token = self._token, None
        assert token is not None
        step = region().step
        _region.reset(token)
        outermost = step is not None and region().step is None
        if outermost and self._told.enabled and torch.is_grad_enabled():
            step.leave()  # type: ignore[union-attr]

    def _recreate_cm(self) -> "autocast":
        # As a decorator: every call has a region of its own.
        return autocast(*self._told)


@torch.compiler.assume_constant_result
def _in_one_graph() -> bool:
    """Whether a compiler may not leave its graph (``fullgraph=True``). One that may leaves it here,
    for what :class:`contextvars.ContextVar` does: between two graphs Python has to know the region.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator.current_tx(), "one_graph", False)


def _told(told: Told, step: Optional[Step]) -> Region:
    """The region of what ``autocast`` was told."""
    # What is quantized notes its amaxes anyway.
    calibrates = told.calibrating and not told.enabled
    if not told.enabled and not calibrates:
        key = _key(_HIGH_PRECISION.recipe)
        return _HIGH_PRECISION._replace(step=step, key=key, told=told)
    asked = get_default_recipe() if told.recipe is None else told.recipe
    recipe = recipe_of(asked)
    handed = "none" if calibrates else hand_over_of(asked)
    return Region(recipe, told.group, step, _key(recipe), handed, calibrates, asked, told)


@torch.compiler.assume_constant_result
def _number(*told: Any) -> int:
    """The number of a region among those of graphs, where no steps of delayed scaling are counted."""
    new = _told(Told(*told), None)
    if new not in _of_graphs:
        _of_graphs.append(new)
    return _of_graphs.index(new)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> autocast:
    """The old name of :class:`autocast`."""
    warnings.warn("fp8_autocast is deprecated: use autocast, which it calls", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def get_default_recipe() -> Recipe:
    """The recipe of regions that name none: MXFP8, which TransformerEngine takes where it runs."""
    return MXFP8BlockScaling()


get_default_fp8_recipe = get_default_recipe


def set_region(new: Optional[Region]) -> None:
    """Has modules follow a region from now on; without one, high precision."""
    _region.set(_HIGH_PRECISION if new is None else new)


@contextlib.contextmanager
def _inside(new: Region):
    token = _region.set(new)
    try:
        yield
    finally:
        _region.reset(token)


def checkpoint(function: Callable, *args, **kwargs):
    """``torch.utils.checkpoint.checkpoint`` for modules that follow ``autocast``: what is computed
    again is computed as it was the first time, with the numbers that ``get_rng_state_tracker()``
    gave then.

    With delayed scaling the backward pass has to come before the next outermost region, whose end
    moves the scales on for the second time.
    """
    use_reentrant = kwargs.pop("use_reentrant", True)
    distributed = kwargs.pop("distribute_saved_activations", False)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    kwargs.pop("tp_group", None)  # of distributed activations alone
    if len(args) > 3 and isinstance(args[0], bool) and callable(args[1]):
        warnings.warn(
            "checkpoint: pass distribute_saved_activations, get_rng_state_tracker and tp_group as keyword arguments",
            DeprecationWarning,
            stacklevel=2,
        )
        distributed, tracker, args = args[0], args[1], args[3:]
    refuse("checkpoint", "distribute_saved_activations", distributed, False)
    here, before = region(), None

    def again(*args, **kwargs):
        nonlocal before
        with contextlib.ExitStack() as stack:
            stack.enter_context(_inside(here))
            if tracker is not None and before is None:
                before = tracker().get_states()
            elif tracker is not None:
                now = tracker().get_states()
                tracker().set_states(dict(before))
                stack.callback(tracker().set_states, now)
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=use_reentrant, **kwargs)

"""What all layers have in common: a recipe, the workers that they agree with, and what they note
about a step.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

import nvfp4

from ._delayed import Delays, HandedOver
from ._finite import SLOTS, Watch
from ._formats import Formats, plan_of
from ._function import STATELESS, UNWATCHED, linear
from ._gather import GathersCodes, hindrance_of
from ._inputs import check_input, fits
from ._kept import Kept, can_be_kept, weights_may_have_changed
from ._main_grad import Later, Store
from ._ops import PLAIN
from ._parallel import Parallel, Workers
from ._quantized import QuantizedTensor

# A graph has no place for what is computed after the backward pass.
_delaying = torch.compiler.disable(linear)


class Layer(Delays):
    """A layer whose products are in the formats of a recipe.

    It is known to recipes by its ``path``. With a buffer ``input_amax`` and a quantized parameter,
    x is quantized by that amax instead of its own.
    """

    path: str
    seed: int = 0
    # Whether gradients of weights are added to ``weight.main_grad``, where a weight has one.
    fuse_wgrad_accumulation: bool = False
    _workers: Optional[Workers] = None
    # How its output is spread where its weight is a DTensor of some inputs; None for sums to be
    # added.
    output_layout: Any = None
    _not_finite: Optional[Tensor] = None
    _products: List[Tuple[str, str, Formats]] = []
    # How workers split each product, by its number; what is not there they do not.
    _parallel: Dict[int, Parallel] = {}
    # The codes of each product's weight.
    _kept: List[Kept] = []

    @classmethod
    def sites_of(cls, layer: torch.nn.Module, path: str) -> List[Tuple]:
        """The linear layers in a layer of this kind, as plans name them if it is at this path."""
        return [(path, "linear")]

    def products(self) -> List[Tuple[str, str, Formats]]:
        """For each product: the prefix of its state, the name of its tensors in messages with
        ``{}`` for the slot, and the formats.
        """
        raise NotImplementedError

    def weights(self) -> List[str]:
        """The names of the products' weights; none of weights that lie in another order."""
        return []

    def follow_plan(self, plan: nvfp4.Plan) -> None:
        """Takes its formats from a plan that has its sites."""
        raise NotImplementedError

    def use_recipe(self, recipe: Union[str, nvfp4.Recipe]) -> None:
        """Switches to another recipe. Nothing else changes: parameters stay what they are."""
        self.take_formats(plan_of(recipe, self.sites_of(self, self.path)))

    def take_formats(self, plan: nvfp4.Plan) -> None:
        """Switches to the formats of a plan that has its sites, and keeps the state they need."""
        self.follow_plan(plan)
        self._products = self.products()
        self._kept = [Kept() for _ in self._products]
        for name, (_, _, formats) in zip(self.weights(), self._products):
            weight = self._parameters.get(name)
            local = getattr(weight, "_local_tensor", weight)
            if isinstance(local, GathersCodes):
                local.spec = formats.weight.spec if hindrance_of(formats) is None else "high-precision"
        device = next(self.parameters()).device
        self.keep_scales({prefix: formats for prefix, _, formats in self._products}, device)
        self._flags(device)

    @property
    def amax_group(self) -> Any:
        """The process group whose workers agree on amaxes, or None. It is not in pickles."""
        return None if self._workers is None else self._workers.group

    @amax_group.setter
    def amax_group(self, group: Any) -> None:
        self._workers = None if group is None else Workers(group)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        number: int = 0,
        handed: Optional[HandedOver] = None,
        store: Optional[Store] = None,
    ) -> Tensor:
        """``x·wᵀ + bias`` in the formats of the product with this number.

        ``handed`` says what is quantized already, ``store`` where the weight's gradient waits.
        """
        if type(weight) is not QuantizedTensor or type(x) not in PLAIN or torch.compiler.is_compiling():
            return self._multiply(x, weight, bias, number, handed, store)
        # Else Python is asked for each attribute of the weight.
        with torch._C.DisableTorchFunctionSubclass():
            return self._multiply(x, weight, bias, number, handed, store)

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        number: int,
        handed: Optional[HandedOver],
        store: Optional[Store],
    ) -> Tensor:
        prefix, name, formats = self._products[number]
        if not fits(x, weight):
            check_input(x, weight, name, formats.quantizes)
        watch = self.watch_of(number, x.device)
        state = STATELESS if self.delayed is None else self.state_of(formats, prefix)
        # Evaluation is one worker's own: another may evaluate nothing.
        workers = self._workers if self.training else None
        group = None if workers is None else workers.group
        kept = self._kept[number] if can_be_kept(weight) else None
        amax = self._buffers.get("input_amax")
        main = self.main_of(weight)
        given = (formats, self.seed, group, state, watch, kept, amax, main, handed)
        later = None if store is None else Later(store, weight)
        if hasattr(weight, "device_mesh"):  # a DTensor, which not every torch has
            from ._spread import spread_linear

            self.__dict__["_spread"] = Workers(weight.device_mesh.get_group())  # type: ignore
            return spread_linear(x, weight, bias, given, later, self.output_layout)
        parallel = self._parallel.get(number)
        if store is None:
            return linear(x, weight, bias, *given, later, parallel)
        return _delaying(x, weight, bias, *given, later, parallel)

    def main_of(self, weight: Tensor) -> Optional[Tensor]:
        """The weight, if its gradient goes into ``main_grad``."""
        return weight if self.fuse_wgrad_accumulation and getattr(weight, "main_grad", None) is not None else None

    def watch_of(self, number: int, device: torch.device) -> Watch:
        """What is watched of the product with this number."""
        _, name, formats = self._products[number]
        if formats.finite != "refuse":
            return UNWATCHED
        flags, first = self._flags(device), number * len(SLOTS)
        return Watch(name, None if flags is None else flags[first : first + len(SLOTS)])

    def part_groups(self) -> List[Any]:
        spread = self.__dict__.get("_spread")
        workers = [spread, *(parallel.workers for parallel in self._parallel.values())]
        return list({id(of.group): of.group for of in workers if of is not None}.values())

    def forget_weights(self) -> None:
        """Drops the codes of weights that are kept."""
        for kept in self._kept:
            kept.forget()

    def not_finite(self) -> Tuple[Optional[Tensor], List[str]]:
        """The flags on a GPU, if something is watched there, and the tensors that they are for."""
        return self._not_finite, [name.format(slot) for _, name, _ in self._products for slot in SLOTS]

    def _flags(self, device: torch.device) -> Optional[Tensor]:
        """A flag for every tensor, on a GPU, where a call cannot wait to find out whether a tensor
        is finite.
        """
        if device.type != "cuda" or all(formats.finite == "keep" for _, _, formats in self._products):
            return None
        count = len(SLOTS) * len(self._products)
        if self._not_finite is None or self._not_finite.device != device or self._not_finite.numel() != count:
            self._not_finite = torch.full((count,), -1, dtype=torch.int64, device=device)
        return self._not_finite

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # FSDP2 sets a parameter that it has gathered anew, in the same memory.
        if name in self.__dict__.get("_parameters", ()):
            self.forget_weights()

    def train(self, mode: bool = True):
        # Averages of weights come and go here, as a rule through ``.data``.
        if mode != self.training:
            self.forget_weights()
        return super().train(mode)

    def _save_to_state_dict(self, *args):
        super()._save_to_state_dict(*args)
        self.forget_weights()  # what has a DTensor of a state dict may write to it, uncounted

    def _load_from_state_dict(self, *args):
        self.forget_weights()  # nothing refers to a parameter that is swapped
        super()._load_from_state_dict(*args)
        weights_may_have_changed()  # those of FSDP change where no version is counted

    def _apply(self, fn, recurse=True):
        self.forget_weights()
        amax = self._buffers.get("input_amax")
        super()._apply(fn, recurse)
        moved = self._buffers.get("input_amax")
        if amax is not None and moved is not None and not amax.is_meta and not moved.is_meta:
            self._buffers["input_amax"] = amax.to(moved.device)  # to another device, but never to another type
        self._flags(next(self.parameters()).device)
        return self

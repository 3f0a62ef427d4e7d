"""Weights in high precision whose shards FSDP2 gathers as codes."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import nvfp4

from . import _ops  # noqa: F401  (makes the operations known)
from ._agree import Amaxes, Part, Split, agreed
from ._changes import in_place
from ._formats import Format, Formats
from ._quantized import gathered_whole
from ._travel import hindrance, send

_aten = torch.ops.aten
_quantize = torch.ops.nvfp4.quantize


class Agreed:
    """The amaxes that workers have agreed on, for a weight in one format and type; all views of a
    shard have the same one. It ends with a change of the shard.

    Workers change their shards together, so all of them have one or none.
    """

    __slots__ = ("key", "amaxes", "split", "dtype", "sent")

    def __init__(self) -> None:
        self.key: Optional[Tuple[str, torch.dtype]] = None
        self.amaxes: Amaxes = []
        # What it was last gathered by, which says what to agree on ahead.
        self.split, self.dtype = Split(), None  # type: Split, Optional[torch.dtype]
        self.sent: Optional[str] = None

    def gathered_as(self, sent: str) -> None:
        """Refuses what FSDP2 has no room for: it makes that once, for what it gathers first."""
        if self.sent not in (None, sent):
            raise RuntimeError(
                f"FSDP2 has gathered a weight as {self.sent} and cannot gather it as {sent}: "
                "switch recipes before the first pass"
            )
        self.sent = sent

    def end(self) -> None:
        self.key = None

    def __deepcopy__(self, memo: Any) -> "Agreed":
        return Agreed()


class Plain(NamedTuple):
    """What is known of a weight that was gathered as it is."""

    shape: Tuple[int, ...]


class GathersCodes(torch.Tensor):
    """A weight in high precision that FSDP2 gathers as codes in the format of its layer.

    Everything else sees its values: optimizers change them, checkpoints have them, and files of
    ``torch.save`` hold an ordinary tensor.
    """

    raw: Tensor
    spec: str
    # The workers that have other parts of it before FSDP2 shards it.
    others: Split
    _agreed: Agreed
    # Whether it is a copy of the shard that has agreed, on another device.
    _lent: bool

    @staticmethod
    def __new__(cls, values, spec, split=Split(), known=None, lent=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device=values.device,
        )  # fmt: skip

    def __init__(self, values, spec, split=Split(), known=None, lent=False):
        self.raw, self.spec, self.others = values, spec, split
        self._agreed, self._lent = Agreed() if known is None else known, lent

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return f"GathersCodes({self.raw}, {self.spec})"

    def __tensor_flatten__(self):
        return ["raw"], (self.spec, self.others, self._agreed)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return GathersCodes(inner["raw"], *context)

    def __reduce_ex__(self, protocol):
        return self.raw.__reduce_ex__(protocol)

    # How FSDP2 gathers the shards.

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """What a shard sends: codes and scales, or its values where those are no whole blocks."""
        asked = self.dtype if mp_policy is None else mp_policy.param_dtype or self.dtype
        values, workers = self.raw.to(asked), mesh.size()
        outer = tuple(outer_size)
        plain = self.spec == "high-precision" or hindrance(self.spec, outer, workers, asked)
        self._agreed.gathered_as("values" if plain else self.spec)
        if plain:
            missing = -(-outer[0] // workers) - values.shape[0]
            return (torch.nn.functional.pad(values, (0, 0, 0, missing)),), Plain(outer)
        rows = (mesh.get_group(), *self.others.rows)
        self._agreed.split = self.others._replace(rows=rows)
        self._agreed.dtype = asked
        if self._agreed.key != (self.spec, asked):
            agree([self])
        arrays = _quantize(values, self.spec, "both", 0, None, *self._agreed.amaxes)
        sent, freight = send(arrays, self.spec, "both", tuple(self.shape))  # type: ignore[arg-type]
        return (sent,), freight

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        """The whole weight: a :class:`QuantizedTensor`, or values."""
        if isinstance(metadata, Plain):
            return None if out is not None else (gathered[0], gathered)
        return gathered_whole(gathered, metadata, param_dtype, getattr(out, "_local_tensor", out))

    # Operations.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            return in_place(
                function, args, kwargs, GathersCodes, lambda t: t.raw, GathersCodes._changed
            )
        made = function(*tree_map_only(GathersCodes, lambda t: t.raw, args), **kwargs)
        known = _KEPT.get(function)
        if known is None or not isinstance(args[0], GathersCodes):
            return made
        return tree_map_only(Tensor, lambda t: args[0]._like(t, known), made)

    def _like(self, values: Tensor, kind: str) -> "GathersCodes":
        lent = kind == "lent" or self._lent
        known = None if kind == "new" or values.dtype is not self.dtype else self._agreed
        return GathersCodes(values, self.spec, self.others, known, lent)

    def _changed(self, _: Tensor) -> None:
        if self._lent:  # the shard itself is what it was
            self._agreed, self._lent = Agreed(), False
        self._agreed.end()


# What becomes a weight of the same kind: a view, a copy elsewhere, another one.
_KEPT: Dict[Any, str] = {
    _aten.detach.default: "view",
    _aten.alias.default: "view",
    _aten.view.default: "view",
    _aten.as_strided.default: "view",
    _aten.split.Tensor: "view",
    _aten.slice.Tensor: "view",
    _aten._to_copy.default: "lent",
    _aten._pin_memory.default: "lent",
    _aten.clone.default: "new",
    _aten.new_zeros.default: "new",
    _aten.empty_like.default: "new",
    _aten.new_empty.default: "new",
}


def hindrance_of(formats: Formats) -> Optional[str]:
    """Why weights of a layer in these formats never travel as codes."""
    if formats.weight.spec == "high-precision":
        return "the recipe does not quantize it"
    if formats.weight.delayed:
        return "its scale is that of earlier steps"
    if not formats.trained:
        return "the recipe leaves a direction in high precision, or rounds stochastically"
    return None


def _format(spec: str) -> Format:
    return Format.of(nvfp4.Quantizer(spec=spec, directions="both"))


def agree(weights: List[GathersCodes]) -> None:
    """Agrees on the amaxes of weights with all workers that have parts of them."""
    parts = []
    for weight in weights:
        values, spec = weight.raw.to(weight._agreed.dtype), weight.spec

        def arrays(*amaxes: Optional[Tensor], x: Tensor = values, spec: str = spec) -> List[Tensor]:
            return _quantize(x, spec, "both", 0, None, *amaxes)

        parts.append(Part(values, _format(spec), weight._agreed.split, arrays))
    for weight, amaxes in zip(weights, agreed(parts)):
        assert weight._agreed.dtype is not None, "it is known by whom it is gathered"
        weight._agreed.amaxes, weight._agreed.key = amaxes, (weight.spec, weight._agreed.dtype)

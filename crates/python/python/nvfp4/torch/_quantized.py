"""A parameter that exists as codes: a tensor of torch that holds a quantized matrix."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import nvfp4

from . import _ops  # noqa: F401  (makes the operations known)
from ._blocks import block_of, parts_of, scaling_dim, shapes
from ._changes import in_place
from ._travel import Freight, receive, send

_quantize = torch.ops.nvfp4.quantize_blocks.default
dequantize_block = torch.ops.nvfp4.dequantize_block.default
prepare_block = torch.ops.nvfp4.prepare_block.default
_aten = torch.ops.aten


class Codes(NamedTuple):
    """The blocks of a weight: its row direction, its column direction if it is there, and the row
    direction in the order of tensor cores, or of this CPU, if it is prepared.
    """

    row: Tensor
    column: Optional[Tensor] = None
    prepared: Optional[Tensor] = None


class CodedWeight:
    """A tensor that layers multiply by as codes: it has a ``spec``, the shape of a ``matrix``, and
    its ``codes``. ``multiplied`` says which directions products read; none, if they read values.
    """

    spec: str
    matrix: Tuple[int, int]
    _prepared: Optional[Any]

    @property
    def multiplied(self) -> Tuple[str, ...]:
        """"row", or "row" and "column", or nothing."""
        raise NotImplementedError

    @property
    def codes(self) -> Codes:
        """The blocks that products read."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Brings the codes in the order that few tokens read fastest, once, where there is one."""


def coded(weight: Any) -> Any:
    """A weight if layers multiply by its codes, else None."""
    return weight if isinstance(weight, CodedWeight) and weight.multiplied else None


class QuantizedTensor(CodedWeight, torch.Tensor):
    """A matrix that exists as codes and scales, with the shape, type and device that torch sees.

    Its values are those of the row direction: ``dequantize()``. Layers of this package multiply by
    the codes as they are; any other operation computes on the values. An operation in place, as an
    optimizer's, quantizes its result again: with a ``master``, a copy in float32, it changes the
    master, and the codes follow from it.

    >>> import torch, nvfp4.torch
    >>> w = nvfp4.torch.QuantizedTensor.quantize(torch.randn(32, 64), "nvfp4(16x16)")
    >>> w.shape, w.dtype, w.nbytes
    (torch.Size([32, 64]), torch.float32, 2568)
    >>> torch.equal(w + 0, w.dequantize())
    True
    """

    row: Tensor
    column: Optional[Tensor]
    master: Optional[Tensor]
    _prepared: Optional[Tensor]
    # Whether it is some rows of another one; whether they changed since the workers last agreed on
    # its amax; and, without a master, the values that they changed to.
    _part: bool
    _changed: bool
    _pending: Optional[Tensor]
    # Its version and that of its codes when it was last used.
    _seen: Optional[Tuple[int, int]]

    @staticmethod
    def __new__(cls, row, column, spec, matrix, dtype, master=None, shape=None):
        shape = matrix if shape is None else shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=row.device)

    def __init__(self, row, column, spec, matrix, dtype, master=None, shape=None):
        self.row, self.column, self.master = row, column, master
        self.spec, self.matrix, self._prepared, self._prepared_at = spec, matrix, None, None
        self._part, self._changed, self._pending, self._seen = False, False, None, None
        self._in_graphs = False

    @classmethod
    def quantize(
        cls, x: Tensor, spec: str, directions: str = "both", master: Optional[Tensor] = None
    ) -> "QuantizedTensor":
        """Quantizes a matrix.

        ``directions`` is "both", or "row" for weights that no gradient passes through in a quantized
        format. ``master`` is kept beside the codes.
        """
        if x.dim() != 2:
            raise ValueError(f"a quantized parameter is a matrix; this tensor has the shape {tuple(x.shape)}")
        if directions not in ("row", "both"):
            raise ValueError(f"unknown directions '{directions}'; there are 'row', 'both'")
        check_spec(spec)
        blocks = _quantize(x.detach(), spec, directions)
        return cls(blocks[0], blocks[1] if len(blocks) > 1 else None, spec, tuple(x.shape), x.dtype, master)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The values, as a tensor like any other."""
        self._check()
        rows, cols = self.matrix
        return dequantize_block(self.row, self.spec, rows, cols, self.dtype).view(self.shape)

    @property
    def multiplied(self) -> Tuple[str, ...]:
        return ("row",) if self.column is None else ("row", "column")

    @property
    def codes(self) -> Codes:
        """The blocks that products read."""
        self._check()
        return Codes(self.row, self.column, self._still_prepared())

    def _sides(self) -> List[Tuple[str, Tensor]]:
        """The blocks by their directions."""
        return [("row", self.row)] + ([] if self.column is None else [("column", self.column)])

    @property
    def directions(self) -> str:
        """"both" or "row"."""
        return "row" if self.column is None else "both"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales, of the master if there is one, and of prepared codes."""
        kept = (self.row, self.column, self.master, self._still_prepared())
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def prepare(self) -> None:
        """Brings the codes in the order of tensor cores or of this CPU, once: for products with few
        tokens.

        Formats other than NVFP4 have none. A copy, or a change of the codes, drops it.
        """
        if self._still_prepared() is None and not self.row.is_meta:
            made = prepare_block(self.row, self.spec, *self.matrix)
            self._prepared, self._prepared_at = made[0] if made else None, self._versions()

    def _still_prepared(self) -> Optional[Tensor]:
        """What was prepared, unless the codes have changed since: also by way of other tensors that
        have them, and in a compiled function.
        """
        if self._prepared is not None and not torch.compiler.is_compiling() and self._prepared_at != self._versions():
            self._prepared = None
        return self._prepared

    def _versions(self) -> Optional[Tuple[int, int]]:
        """How often this tensor was changed, and its codes, where torch counts it."""
        return None if self.is_inference() or self.row.is_inference() else (self._version, self.row._version)

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        master = "" if self.master is None else f", master={self.master.dtype}"
        return (
            f"QuantizedTensor({tuple(self.shape)}, {self.spec}, {self.directions}, "
            f"dtype={self.dtype}, device='{self.device}'{master})"
        )

    def share_memory_(self) -> "QuantizedTensor":
        """Moves codes and master to memory that processes share."""
        for tensor in (self.row, self.column, self.master):
            if tensor is not None:
                tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.row.is_shared()

    # How compilers see it.

    def __tensor_flatten__(self):
        inner = [name for name in ("row", "column", "master") if getattr(self, name) is not None]
        # A compiled function is for tensors that have prepared codes, or for those that have none. An
        # exported one is for all devices, whose orders differ.
        if torch.compiler.is_compiling() and not _exporting():
            self._in_graphs = True
        if self._in_graphs and self._still_prepared() is not None:
            inner.append("_prepared")
        return inner, (self.spec, self.matrix, self.dtype, "_prepared" in inner)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        spec, matrix, dtype, _ = context
        made = QuantizedTensor(
            inner["row"], inner.get("column"), spec, matrix, dtype, inner.get("master"), tuple(outer_size)
        )
        made._prepared, made._prepared_at = inner.get("_prepared"), made._versions()
        return made

    # What is saved: not the order of one kind of device.

    def __getstate__(self):
        return {**self.__dict__, "_prepared": None, "_seen": None, "_in_graphs": False}

    # How FSDP2 gathers the shards: codes and scales travel, not values.

    def fsdp_pre_all_gather(self, mesh, outer_size=None, outer_stride=None, module=None, mp_policy=None):
        if self._changed:
            self._agree(mesh.get_group())
        arrays = [part for side, block in self._sides() for part in parts_of(block, self.spec, side, self.matrix)]
        sent, freight = send(arrays, self.spec, self.directions, self.matrix)
        return (sent,), freight

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return gathered_whole(gathered, metadata, param_dtype, out)

    def _agree(self, group) -> None:
        """Quantizes changed values again, by the amaxes of all workers' rows: a shard alone has its
        own.
        """
        from ._composed import quantized
        from ._formats import Format

        values = self.master if self._pending is None else self._pending
        assert values is not None, "it changed"
        format = Format.of(nvfp4.Quantizer(spec=self.spec, directions=self.directions))
        parts = quantized(values.view(self.matrix), format, group=group)
        self.row.copy_(block_of(parts[: format.row]))
        if self.column is not None:
            self.column.copy_(block_of(parts[format.row :]))
        self._changed, self._pending, self._prepared = False, None, None

    # Operations.

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        known = FUNCTIONS.get(function)
        if known is not None and len(types) > 1:  # the others have a say in what it consists of
            return known(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return (known or function)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = _KNOWN.get(function)
        if function is not _aten.copy_.default:  # it asks for no earlier values
            tree_map_only(QuantizedTensor, QuantizedTensor._check, (args, kwargs))
        if known is not None:
            return known(function, *args, **kwargs)
        if function._schema.is_mutable:
            return in_place(
                function, args, kwargs, QuantizedTensor, QuantizedTensor._values, QuantizedTensor._take
            )
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
        return function(*args, **kwargs)

    def like_this(self, change, shape=None, dtype=None) -> "QuantizedTensor":
        """The same with something done to each of its tensors."""
        inner = [None if tensor is None else change(tensor) for tensor in (self.row, self.column, self.master)]
        made = QuantizedTensor(
            inner[0], inner[1], self.spec, self.matrix, dtype or self.dtype, inner[2], self.shape if shape is None else shape
        )
        made._shares(self)
        return made

    def _shares(self, other: "QuantizedTensor") -> None:
        """Is of the same shard as another one."""
        self._part, self._changed, self._pending = other._part, other._changed, other._pending

    def _values(self) -> Tensor:
        """What an operation in place starts from: the master, if there is one."""
        if self.master is None:
            return self.dequantize()
        return self.master.clone().view(self.shape)

    def _take(self, values: Tensor) -> None:
        """Takes other values: the master, if there is one, as they are, and the codes of them."""
        values = values.expand(self.shape).reshape(self.matrix)
        if self.master is not None:
            self.master.copy_(values)
            values = self.master
        made = QuantizedTensor.quantize(values.to(torch.promote_types(self.dtype, values.dtype)), self.spec, self.directions)
        self.row.copy_(made.row)
        if self.column is not None and made.column is not None:
            self.column.copy_(made.column)
        self._count()
        if self._part:
            self._changed, self._pending = True, None if self.master is not None else values

    def _count(self) -> None:
        """Counts a change of the codes, as torch does not below an operation in place: a backward
        pass that has saved them must not read other ones.
        """
        self._prepared = None
        for block in (self.row, self.column):
            if block is not None and not torch.compiler.is_compiling() and not block.is_inference():
                torch.autograd.graph.increment_version(block)

    def _check(self) -> None:
        """Makes it an error if a view of the values was written to: they are a copy, so the change
        would be lost. torch counts it as a change of this tensor; the codes are those of before.
        """
        now = None if torch.compiler.is_compiling() else self._versions()
        if now is None:
            return
        if self._seen is not None and now[0] != self._seen[0] and now[1] == self._seen[1]:
            raise RuntimeError(
                f"{self!r} was changed through a view of its values (as weight[0].zero_() does), which its codes do not follow: "
                "change all of it, as by weight.copy_(values). If a compiled function has changed all of it, call "
                "nvfp4.torch.weights_changed(model) after it"
            )
        self._seen = now


# As in torch 2.7 and newer.
_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def check_spec(spec: str) -> None:
    if nvfp4.Delayed.parts(spec):
        raise ValueError(f"{spec}: a quantized parameter has no scale of earlier steps; choose another format for the weight")
    if "stochastic" in spec or spec.startswith("high-precision"):
        raise ValueError(f"{spec}: a quantized parameter is rounded to the nearest code of a quantized format")


def gathered_whole(gathered, freight: Freight, dtype: torch.dtype, out: Optional[QuantizedTensor]):
    """The weight of what all workers sent, as FSDP2 asks for it: in the memory of ``out``, which is
    there again, or as a new tensor with the memory that it may free.
    """
    for array in freight.common.values():
        if array.is_cuda:  # they were made on the stream that gathers
            array.record_stream(torch.cuda.current_stream(array.device))
    arrays, matrix = receive(gathered[0], freight)
    number = len(shapes(freight.spec, "row", matrix))
    row = block_of(arrays[:number])
    column = block_of(arrays[number:]) if freight.directions == "both" else None
    made = QuantizedTensor(row, column, freight.spec, matrix, dtype)
    if out is None:
        return made, tuple(block for _, block in made._sides())
    # What a backward pass has saved of it is the same again, so it is no change.
    with torch.autograd._unsafe_preserve_version_counter(tuple(block for _, block in out._sides())):
        _copy(None, out, made)
    return None


def _rows(tensor: QuantizedTensor, start: int, end: int) -> QuantizedTensor:
    """Some rows, by their codes."""
    rows, cols = tensor.matrix
    blocks: Dict[str, Tensor] = {}
    for side, block in tensor._sides():
        pieces = []
        for part, (_, shape) in zip(parts_of(block, tensor.spec, side, tensor.matrix), shapes(tensor.spec, side, (end - start, cols))):
            if tuple(part.shape) != shape:
                dim = scaling_dim(shape, tuple(part.shape))
                size, length = part.shape[dim], shape[dim]
                if length * rows != size * (end - start) or start * size % rows:
                    raise ValueError(
                        f"rows {start} to {end} of {rows} cut through blocks of {tensor.spec}: shard such weights in whole ones"
                    )
                part = part.narrow(dim, start * size // rows, length)
            pieces.append(part)
        blocks[side] = block_of(pieces)
    master = None if tensor.master is None else tensor.master[start:end].clone()
    made = QuantizedTensor(blocks["row"], blocks.get("column"), tensor.spec, (end - start, cols), tensor.dtype, master)
    made._part = True
    return made


def _same(function, tensor, *args, **kwargs):
    return tensor.like_this(lambda inner: function(inner, *args, **kwargs))


def _alias(function, tensor, *args, **kwargs):
    # The same blocks, so that changes of either are counted for both.
    made = tensor.like_this(lambda inner: inner)
    made._prepared, made._prepared_at = tensor._still_prepared(), made._versions()
    return made


def _to(function, tensor, *, dtype=None, device=None, non_blocking=False, **kwargs):
    if dtype is not None and not dtype.is_floating_point:
        return function(tensor.dequantize(), dtype=dtype, device=device)
    # Codes are the same in every type. The master stays what it is.
    move = functools.partial(torch.ops.aten._to_copy.default, device=device, non_blocking=non_blocking)
    return tensor.like_this(move, dtype=dtype)


def _copy(function, target, source, non_blocking=False):
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(), non_blocking)
    same = isinstance(source, QuantizedTensor) and (source.spec, source.matrix) == (target.spec, target.matrix)
    if not same or (target.column is not None and source.column is None):
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        target._take(values.to(target.device))
        return target
    target.row.copy_(source.row, non_blocking)
    if target.column is not None:
        target.column.copy_(source.column, non_blocking)
    if target.master is not None:
        target.master.copy_(source.dequantize() if source.master is None else source.master)
    target._count()
    target._shares(source)
    return target


def _view(function, tensor, shape):
    sizes = tuple(shape)
    if sizes in ((-1,), (tensor.numel(),)):
        return tensor.like_this(lambda inner: inner, shape=(tensor.numel(),))
    if sizes == tensor.matrix:
        return tensor.like_this(lambda inner: inner, shape=sizes)
    return function(tensor.dequantize(), shape)


def _strided(function, tensor, size, stride, storage_offset=None):
    if tuple(size) == tensor.matrix and tuple(stride) == (tensor.matrix[1], 1) and not storage_offset:
        return tensor.like_this(lambda inner: inner, shape=tensor.matrix)
    return function(tensor.dequantize(), size, stride, storage_offset)


def _split(function, tensor, size, dim=0):
    rows = tensor.matrix[0]
    if dim not in (0, -2) or tuple(tensor.shape) != tensor.matrix or not isinstance(size, int):
        return function(tensor.dequantize(), size, dim)
    if rows % size:
        raise ValueError(f"{rows} rows of a quantized parameter do not divide into shards of {size}: choose another number of workers")
    return [_rows(tensor, start, start + size) for start in range(0, rows, size)]


def _slice(function, tensor, dim=0, start=None, end=None, step=1):
    begin, stop = start or 0, tensor.shape[dim] if end is None else end
    if begin == 0 and stop >= tensor.shape[dim] and step == 1:
        return tensor.like_this(lambda inner: inner)
    return function(tensor.dequantize(), dim, start, end, step)


def _zeros(function, tensor, size, **kwargs):
    plain = tensor.row.new_zeros(size, dtype=kwargs.get("dtype") or tensor.dtype, device=kwargs.get("device"))
    if len(size) != 2 or kwargs.get("dtype") not in (None, tensor.dtype):
        return plain
    master = None if tensor.master is None else plain.to(tensor.master.dtype)
    made = QuantizedTensor.quantize(plain, tensor.spec, tensor.directions, master)
    made._part = tuple(size) != tensor.matrix  # where FSDP2 puts a shard
    return made


def _like(function, tensor, **kwargs):
    """A tensor beside it, which is not quantized: the state of an optimizer."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None and name != "memory_format"}
    plain = torch.empty(tensor.shape, dtype=kwargs.pop("dtype", tensor.dtype), device=kwargs.pop("device", tensor.device))
    return function(plain, **kwargs)


_KNOWN: Dict[Any, Any] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.clone.default: _same,
    _aten._to_copy.default: _to,
    _aten._pin_memory.default: _same,
    _aten.copy_.default: _copy,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.as_strided.default: _strided,
    _aten.split.Tensor: _split,
    _aten.slice.Tensor: _slice,
    _aten.new_zeros.default: _zeros,
    _aten.zeros_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.empty_like.default: _like,
    _aten.rand_like.default: _like,
    _aten.randn_like.default: _like,
}

# Functions of torch that mean something else for such a tensor, to which modules add theirs.
FUNCTIONS: Dict[Any, Any] = {
    torch.Tensor.data.__set__: lambda tensor, values: tensor.detach().copy_(values),  # type: ignore[attr-defined]
}

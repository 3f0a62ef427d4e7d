"""Quantized tensors as weights: layers multiply by their codes."""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

import torch

import nvfp4
from nvfp4.torch import _kept
from nvfp4.torch._blocks import block_of
from nvfp4.torch._quantized import Codes, CodedWeight, prepare_block


class Weight(CodedWeight):
    """A quantized tensor that layers multiply by as codes.

    The blocks that products read are made of its arrays, and made again when one of them changed.
    """

    # The arrays that blocks were made of, with their versions, and the blocks.
    _prepared: Optional[Tuple[Any, Codes]] = None

    def _read(self: Any) -> Tuple[str, Tuple[str, ...]]:
        """The spec of a product's operand, and the directions that products read: no row direction
        where they read the values.
        """
        spec = self._spec() if self._quantizer is None else self._quantizer.spec()
        return spec, tuple(side for side in self._CODES if self._has(side))

    @property
    def spec(self) -> str:  # type: ignore[override]
        return _canonical(self._read()[0])

    @property
    def matrix(self: Any) -> Tuple[int, int]:  # type: ignore[override]
        return tuple(self.shape)

    @property
    def codes(self: Any) -> Codes:  # type: ignore[override]
        if torch.compiler.is_compiling():
            return self._blocks()
        arrays = self._arrays_there()
        # A graph that is replayed reads the arrays of that time.
        if any(a.is_inference() or a.is_meta or _kept.captured(a) for a in arrays):
            return self._blocks()
        key = tuple((id(array), array._version) for array in arrays)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = (key, self._blocks())
        return self._prepared[1]

    def _blocks(self: Any) -> Codes:
        blocks = {side: block_of(self._parts(side)) for side in self._read()[1]}
        return Codes(blocks.get("row"), blocks.get("column"))  # type: ignore[arg-type]

    @property
    def multiplied(self) -> Tuple[str, ...]:
        return self._read()[1]

    def prepare(self: Any) -> None:
        codes = self.codes
        if self._prepared is None or codes.prepared is not None or codes.row.is_meta:
            return
        if _kept.captured(codes.row):  # where they serve once
            return
        made = prepare_block(codes.row, self.spec, *self.matrix)
        if made:
            self._prepared = (self._prepared[0], codes._replace(prepared=made[0]))


@functools.lru_cache(maxsize=None)
def _canonical(spec: str) -> str:
    return nvfp4.Quantizer(spec=spec, directions="both").spec

"""Quantized tensors as weights: layers multiply by their codes."""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

import nvfp4
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
        arrays = self._arrays_there()
        traced = torch.compiler.is_compiling() or any(a.is_inference() or a.is_meta for a in arrays)
        key = None if traced else tuple((id(array), array._version) for array in arrays)
        if key is not None and self._prepared is not None and self._prepared[0] == key:
            return self._prepared[1]
        blocks = {side: block_of(self._parts(side)) for side in self._read()[1]}
        codes = Codes(blocks.get("row"), blocks.get("column"))  # type: ignore[arg-type]
        self._prepared = None if key is None else (key, codes)
        return codes

    @property
    def row(self) -> Tensor:  # type: ignore[override]
        return self.codes.row

    @property
    def column(self) -> Optional[Tensor]:  # type: ignore[override]
        return self.codes.column

    def prepare(self: Any) -> None:
        codes = self.codes
        if self._prepared is None or codes.prepared is not None or not codes.row.is_cuda:
            return
        made = prepare_block(codes.row, self.spec, *self.matrix)
        if made:
            self._prepared = (self._prepared[0], codes._replace(prepared=made[0]))


@functools.lru_cache(maxsize=None)
def _canonical(spec: str) -> str:
    return nvfp4.Quantizer(spec=spec, directions="both").spec

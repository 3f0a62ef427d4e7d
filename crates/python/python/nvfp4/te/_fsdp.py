"""How FSDP2 gathers the shards of quantized tensors: codes and scales travel, not values."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from ._tensor import QuantizedTensor


class Gathered:
    """A tensor of arrays whose shards are gathered."""

    _with_gemm_swizzled_scales: bool = False
    # Whether the column direction of a whole tensor is made of its rows, and is not gathered.
    _column_of_rows = False

    def _shard(self: Any) -> Tuple[Tuple[Optional[Tensor], ...], Dict[str, Any]]:
        """The arrays that travel, and what puts them together again."""
        return self.fsdp_extract_buffers()

    def fsdp_pre_all_gather(self: Any, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        """What a shard sends."""
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError(
                f"FSDP2 is not supported for {type(self).__name__}s with GEMM-swizzled scales: "
                "they lie in tiles of 128 rows"
            )
        if mesh is not None and hasattr(self._quantizer, "with_amax_reduction"):
            self.amax_reduction_group = mesh.get_group()
        arrays, meta = self._shard()
        columns = self._column_of_rows and getattr(self._quantizer, "columnwise_usage", False)
        return arrays, {**meta, "rows": arrays[0].shape[0], "columns": columns}

    def fsdp_post_all_gather(
        self: Any, all_gather_outputs, metadata, param_dtype: torch.dtype, *, out: Any = None
    ):
        """The whole tensor of what was gathered."""
        count = all_gather_outputs[0].shape[0] // metadata["rows"]
        if out is None:
            shape = (self.shape[0] * count, *self.shape[1:])
            out = type(self).make_like(self, shape=shape, dtype=param_dtype)
        out.fsdp_assign_gathered(all_gather_outputs, metadata)
        if self._column_of_rows:
            out._drop("column")
        if metadata["columns"]:
            out._create_columnwise()
        return out, all_gather_outputs


class GatheredSides:
    """A tensor of two formats whose shards are gathered: both directions of them."""

    def fsdp_pre_all_gather(self: Any, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        """What a shard sends."""
        if mesh is not None:
            self._quantizer.amax_reduction_group = mesh.get_group()
            self._quantizer.with_amax_reduction = True
        sides = {"rowwise": self._rowwise_storage, "columnwise": self._columnwise_storage}
        for role, side in sides.items():
            _check(role, side)
        made = {
            role: ((), None) if side is None else side.fsdp_extract_buffers()
            for role, side in sides.items()
        }
        arrays = (*made["rowwise"][0], *made["columnwise"][0])
        metas = made["rowwise"][1], made["columnwise"][1]
        return arrays, (len(made["rowwise"][0]), *metas, *sides.values(), self._quantizer)

    def fsdp_post_all_gather(
        self: Any, all_gather_outputs, metadata, param_dtype: torch.dtype, *, out: Any = None
    ):
        """The whole tensor of what was gathered."""
        number, row_meta, column_meta, row, column, quantizer = metadata
        if out is not None:
            row, column = out._rowwise_storage, out._columnwise_storage
        pieces = all_gather_outputs[:number], all_gather_outputs[number:]
        made = []
        for side, arrays, meta in zip((row, column), pieces, (row_meta, column_meta)):
            if side is not None and out is None:
                side = type(side).make_like(side, shape=arrays[0].shape)
            if side is not None:
                side.fsdp_assign_gathered(arrays, meta)
                side.update_usage(side is row or None, None)
            made.append(side)
        if out is None:
            some = made[0] if made[0] is not None else made[1]
            out = type(self)(
                shape=some.shape, dtype=param_dtype, rowwise_storage=made[0],
                columnwise_storage=made[1], quantizer=quantizer,
            )  # fmt: skip
        return out, all_gather_outputs


def _check(role: str, side: Any) -> None:
    """Refuses a direction that cannot be gathered."""
    if side is None:
        return
    name = type(side).__name__
    if not isinstance(side, QuantizedTensor):
        raise NotImplementedError(
            f"Hybrid FSDP2 all-gather does not support storage-only {role} sub-storage {name}: its "
            "quantizer was internal"
        )
    try:
        side.fsdp_buffer_fields()  # type: ignore[attr-defined]
    except NotImplementedError as error:
        raise NotImplementedError(
            f"Hybrid FSDP2 all-gather is not supported for a {name} {role} sub-storage: it does "
            "not implement fsdp_buffer_fields. Use a supported sub-quantizer "
            "(Float8CurrentScaling, MXFP8, Float8Block) or run without FSDP2."
        ) from error

"""The cache of keys and values for inference, under TransformerEngine's name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from ._left_out import left_out
from ._signature import supports


class InferenceParams:
    """``transformer_engine.pytorch.InferenceParams``, with its cache that is not paged.

    >>> import torch, nvfp4.te as te
    >>> cache = te.InferenceParams(2, 16, num_heads_kv=4, head_dim_k=8, dtype=torch.float32)
    >>> cache.pre_step({"a": 5, "b": 3})  # the numbers of new tokens of two sequences

    Between two steps, sequences that are not named any more are finished. Those that are left keep
    their order, and new ones come after them: queries, keys and values are in that order.
    """

    @supports("num_heads_kv", "head_dim_k", "dtype", "head_dim_v", "max_ctx_len", "qkv_format")
    def __init__(
        self, max_batch_size: int, max_sequence_length: int, num_heads_kv: Optional[int] = None,
        head_dim_k: Optional[int] = None, dtype: Optional[torch.dtype] = None,
        head_dim_v: Optional[int] = None, is_paged: bool = False,
        total_num_pages: Optional[int] = None, page_size: Optional[int] = None,
        max_ctx_len: Optional[int] = None, qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ):  # fmt: skip
        if num_heads_kv is None or head_dim_k is None or dtype is None:
            raise ValueError("InferenceParams needs num_heads_kv, head_dim_k and dtype")
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.dtype, self.is_paged = num_heads_kv, dtype, False
        self.head_dim_k, self.head_dim_v = (
            head_dim_k,
            head_dim_k if head_dim_v is None else head_dim_v,
        )
        self.max_ctx_len, self.input_qkv_format = max_ctx_len, qkv_format
        # By the numbers of layers: keys and values, [sequences, tokens, heads, features].
        self.cache: Dict[int, Tuple[Tensor, Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets all sequences."""
        # How many tokens there are of each, with those of this step and before it.
        self.sequences: "OrderedDict[Any, int]" = OrderedDict()
        self.sequences_pre_step: "OrderedDict[Any, int]" = OrderedDict()
        self._new: Dict[Any, int] = {}
        # Where in the caches the sequences were, if that changed, and the layers that still have
        # them there.
        self._moved: Tuple[int, ...] = ()
        self._to_move: set = set()

    @property
    def batch_size(self) -> int:
        """How many sequences take part in this step."""
        return len(self.sequences)

    def allocate_memory(self, layer_number: int) -> None:
        """Makes the cache of a layer. Its device is that of the first keys, so this may wait."""

    def pre_step(self, step_dict: Any) -> None:
        """Says which sequences come next, and how many new tokens each has."""
        before = list(self.sequences)
        lengths = OrderedDict((name, self.sequences[name]) for name in before if name in step_dict)
        lengths.update((name, 0) for name in step_dict if name not in lengths)
        if len(lengths) > self.max_batch_size:
            raise ValueError(
                f"InferenceParams: expected at most {self.max_batch_size} sequences, got {len(lengths)}"
            )
        stay = [place for place, name in enumerate(before) if name in lengths]
        if stay != list(range(len(stay))):
            if self._to_move:
                raise RuntimeError(
                    f"InferenceParams: the layers {sorted(self._to_move)} were left out of the last step"
                )
            self._moved, self._to_move = tuple(stay), set(self.cache)
        self.sequences_pre_step, self._new = lengths, dict(step_dict)
        self.sequences = OrderedDict(
            (name, tokens + step_dict[name]) for name, tokens in lengths.items()
        )
        longest = max(self.sequences.values(), default=0)
        if longest > self.max_sequence_length:
            raise ValueError(
                f"InferenceParams: expected at most {self.max_sequence_length} tokens in a sequence, got {longest}"
            )

    convert_paged_to_nonpaged = left_out("convert_paged_to_nonpaged")

    def get_seqlens_pre_step(self) -> Tensor:
        """How many tokens each sequence had before this step."""
        return torch.tensor(list(self.sequences_pre_step.values()), dtype=torch.int32)

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """Adds keys and values of new tokens to the cache of a layer. Gives the whole cache,
        [sequences, tokens, heads, features], and how many queries and keys each sequence has.
        """
        if layer_number not in self.cache:
            sizes = (self.max_batch_size, self.max_sequence_length, self.num_heads_kv)
            self.cache[layer_number] = (
                new_k.new_zeros(*sizes, self.head_dim_k, dtype=self.dtype),
                new_v.new_zeros(*sizes, self.head_dim_v, dtype=self.dtype),
            )
        caches = self.cache[layer_number]
        if layer_number in self._to_move:
            self._to_move.remove(layer_number)
            for cache in caches:
                cache[: len(self._moved)] = cache[list(self._moved)]
        first = 0  # of the packed tokens
        for place, (name, start) in enumerate(self.sequences_pre_step.items()):
            count = self._new[name]
            for cache, new in zip(caches, (new_k, new_v)):
                if qkv_format == "thd":
                    tokens = new[first : first + count]
                else:
                    tokens = new[place, :count] if qkv_format == "bshd" else new[:count, place]
                cache[place, start : start + count] = tokens.to(self.dtype)
            first += count
        longest = max(self.sequences.values(), default=0)
        device = new_k.device
        queries = torch.tensor([self._new[name] for name in self.sequences], device=device)
        keys = torch.tensor(list(self.sequences.values()), device=device)
        return (
            caches[0][: self.batch_size, :longest],
            caches[1][: self.batch_size, :longest],
            queries,
            keys,
        )

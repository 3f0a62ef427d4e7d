"""The loss of a vocabulary that workers may share."""

from __future__ import annotations

import warnings
from typing import Any, Optional

import torch
from torch import Tensor


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token in float32, where each worker of a group has a part of the
    vocabulary.
    """

    @staticmethod
    def forward(ctx, logits, target, smoothing, group, ignored):
        x = logits.float()
        size = x.shape[-1]
        workers = 1 if group is None else torch.distributed.get_world_size(group)
        first = 0 if group is None else torch.distributed.get_rank(group) * size

        def together(of: Tensor, how: Any) -> Tensor:
            if group is not None:
                torch.distributed.all_reduce(of, how, group=group)
            return of

        sum_up, largest = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX
        most = together(x.amax(-1, keepdim=True), largest)
        shifted = x - most
        total = together(shifted.exp().sum(-1, keepdim=True), sum_up)
        here = target - first
        mine = (here >= 0) & (here < size)
        index = here.clamp(0, size - 1).unsqueeze(-1)
        chosen = together(shifted.gather(-1, index).squeeze(-1) * mine, sum_up)
        loss = total.log().squeeze(-1) - chosen
        share = smoothing / (size * workers)
        if smoothing:
            mean = together(shifted.sum(-1), sum_up)
            loss = (1 - smoothing) * loss + smoothing * total.log().squeeze(-1) - share * mean
        counts = target != ignored
        grad = shifted.exp() / total - share
        grad.scatter_add_(-1, index, -(1 - smoothing) * mine.unsqueeze(-1).to(grad.dtype))
        ctx.save_for_backward(grad * counts.unsqueeze(-1))
        ctx.dtype = logits.dtype
        return loss * counts

    @staticmethod
    def backward(ctx, loss_grad):
        (grad,) = ctx.saved_tensors
        return (grad * loss_grad.unsqueeze(-1)).to(ctx.dtype), None, None, None, None


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: Optional[Tensor] = None,
) -> Tensor:
    """The cross entropy of each token in float32, or its mean over those that count with
    ``reduce_loss``.

    Workers of ``dist_process_group`` have equal parts of the vocabulary, in the order of their
    ranks.
    """
    if _input is not None:
        warnings.warn("_input is the older name of inp", DeprecationWarning, stacklevel=2)
        inp = _input
    loss = _CrossEntropy.apply(inp, target, label_smoothing, dist_process_group, ignore_idx)
    return loss.sum() / (target != ignore_idx).sum() if reduce_loss else loss

"""Gradients that cannot be differentiated themselves."""

from __future__ import annotations

from typing import Callable, List, Tuple

import torch
from torch import Tensor


def once(gradients: Callable[..., Tuple]) -> Callable[..., Tuple]:
    """Makes gradients of gradients an error.

    ``once_differentiable`` does so only where ``dy`` has a graph, but dx depends on the weight too:
    a penalty on it would silently be a constant.
    """

    def backward(ctx, dy):
        if not torch.is_grad_enabled():
            return gradients(ctx, dy)
        with torch.no_grad():
            found = gradients(ctx, dy)
        if torch.compiler.is_compiling():
            return found
        # This is create_graph=True.
        # They depend on everything that this product does.
        depends = [*_leaves(ctx), *([dy] if dy.requires_grad else [])]
        text = b"gradients of gradients: the product of a quantized layer is differentiated once only; leave it in torch.nn.Linear"
        raises = torch._C._functions.DelayedError(text, len(found) + len(depends))
        marked = raises(*(None if g is None else g.detach().requires_grad_() for g in found), *depends)
        return marked[: len(found)]

    return backward


def _leaves(node) -> List[Tensor]:
    """The tensors at the beginning of a graph."""
    leaves, seen, nodes = [], set(), [node]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = [next for next, _ in node.next_functions if next is not None and next not in seen]
        seen.update(following)
        nodes += following
    return leaves

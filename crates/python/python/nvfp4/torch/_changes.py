"""Operations in place on tensors that exist as codes."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from torch import Tensor
from torch.utils._pytree import tree_map_only


def in_place(
    function,
    args,
    kwargs,
    kind: type,
    values: Callable[[Any], Tensor],
    take: Callable[[Any, Tensor], Any],
):
    """Computes an operation that changes its arguments. Those of this kind are given to it as their
    values, and take what became of them.
    """
    changed = [
        (at, argument.name)
        for at, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    plain: Dict[int, Tuple[Any, Tensor]] = {}

    def found(tensor):
        if id(tensor) not in plain:
            plain[id(tensor)] = (tensor, values(tensor))
        return plain[id(tensor)][1]

    inner_args, inner_kwargs = tree_map_only(kind, found, (args, kwargs))
    result = function(*inner_args, **inner_kwargs)
    for at, name in changed:
        given = kwargs[name] if name in kwargs else args[at] if at < len(args) else None
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(tensor, kind):
                take(tensor, found(tensor))
    if not function._schema.returns:
        return None
    return args[0] if changed and changed[0][0] == 0 else result

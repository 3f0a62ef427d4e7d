"""Arguments in TransformerEngine's order, including those that this package does not implement."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def supports(*names: str) -> Callable[[_Function], _Function]:
    """For a function with TransformerEngine's signature: of the arguments that have a default, only
    these may be given another value.

    So a call means here what it means there, or it fails and names the argument.
    """

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters
        order = list(parameters)
        defaults = {name: given.default for name, given in parameters.items() if given.default is not given.empty}
        where = function.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")

        @functools.wraps(function)
        def checked(*args, **kwargs):
            # Compilers follow this, and no ``Signature.bind``; the call itself refuses what does not fit.
            for name, value in [*zip(order, args), *kwargs.items()]:
                if name in defaults and name not in names:
                    refuse(where, name, value, defaults[name])
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def refuse(where: str, name: str, value: Any, default: Any) -> None:
    """Refuses any value of an argument but its default."""
    if value is not default and value != default:
        raise NotImplementedError(
            f"te.{where}: the argument {name} is not supported here, but for TransformerEngine's default, {default!r}; leave it out"
        )

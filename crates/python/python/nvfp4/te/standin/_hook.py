"""Modules that answer for TransformerEngine's, made when they are imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import types
from typing import Any, Callable, Iterable, Optional

from .._left_out import MODULES
from ._table import DISTRIBUTIONS, EXTENSION, ROOT, TABLE, VERSION

# What stands for a name that is not there, by its module and itself; nothing does, unless a runner
# of tests asks for it: it has to import files of which it runs a part.
on_missing: Optional[Callable[[str, str], Any]] = None


class StandIn(types.ModuleType):
    """A module under a name of TransformerEngine's."""

    def __getattr__(self, name: str) -> Any:
        of, reason = self.__name__, ""
        if name.startswith("__"):
            raise AttributeError(name)
        for source in TABLE.get(of, ()):
            if name.startswith("_") and not source.startswith(__package__):
                continue
            try:
                return getattr(importlib.import_module(source), name)
            except AttributeError as error:
                # A name that is left out for good says why.
                reason = f" ({error})" if f"'{name}': " in str(error) else ""
        if f"{of}.{name}" in TABLE:
            return importlib.import_module(f"{of}.{name}")
        if on_missing is not None:
            return on_missing(of, name)
        raise AttributeError(f"{of}, for which nvfp4.te stands in, has no '{name}'{reason}")

    def __dir__(self) -> Iterable[str]:
        names = set(super().__dir__())
        for source in TABLE.get(self.__name__, ()):
            names.update(name for name in dir(importlib.import_module(source)) if name[0] != "_")
        return sorted(names)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table, and what is told about the package that they are from."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in (ROOT, EXTENSION):
            return None
        if name not in TABLE and on_missing is None:
            below = (why for at, why in MODULES.items() if f"{name}.".startswith(f"{ROOT}.{at}."))
            why = next(below, None)
            if why is not None or name.startswith(f"{ROOT}.pytorch."):
                reason = "" if why is None else f": {why}"
                raise ModuleNotFoundError(
                    f"nvfp4.te stands in for {ROOT} and has nothing for '{name}'{reason}", name=name
                )
            return None
        # Errors of Python name the place where a module is from.
        return importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        module = StandIn(spec.name, f"``{spec.name}``, for which ``nvfp4.te`` stands in.")
        module.__file__ = spec.origin
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in (ROOT, EXTENSION):
            module.__dict__["__version__"] = VERSION

    def find_distributions(self, context: Any = None) -> Iterable["_Distribution"]:
        asked = getattr(context, "name", None)
        for name in DISTRIBUTIONS:
            if asked is None or re.sub("[-_.]+", "_", asked).lower() == name:
                yield _Distribution(name)


class _Distribution(importlib.metadata.Distribution):
    """What is told about a package that is not installed."""

    def __init__(self, name: str):
        self._of = name

    def read_text(self, filename: str) -> Optional[str]:
        if filename != "METADATA":
            return None
        name = f"Metadata-Version: 2.1\nName: {self._of}\nVersion: {VERSION}\n"
        return f"{name}Summary: nvfp4.te stands in for it\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{self._of} has no files: nvfp4.te stands in for it")

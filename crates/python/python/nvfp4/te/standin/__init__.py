"""``import transformer_engine`` without TransformerEngine: programs that are written for it run on
this package as they are.

>>> import nvfp4.te
>>> nvfp4.te.install()                                     # doctest: +SKIP
>>> import transformer_engine.pytorch as te                # doctest: +SKIP

``python -m nvfp4.te script.py`` does the same for a program that does not say so itself. Which
module is answered from where is one table, in ``_table.py``; ``_hook.py`` makes the modules when they
are imported.
"""

from __future__ import annotations

import sys
import warnings

from .._machine import stand_in
from ._hook import Finder, StandIn
from ._table import EXTENSION, ROOT, VERSION

_finder = Finder()


def install() -> None:
    """Lets ``import transformer_engine`` and ``transformer_engine_torch`` find this package from
    now on, and says so in a warning.

    Modules are then made on the GPU, if there is one and no device is named.
    ``importlib.metadata`` answers with the version whose interface it is. A second call does
    nothing. Where the real package is imported already, it is a ``RuntimeError``: two would be
    mixed.
    """
    real = [
        name
        for name in (ROOT, EXTENSION)
        if not isinstance(sys.modules.get(name), (StandIn, type(None)))
    ]
    if real:
        raise RuntimeError(
            f"{' and '.join(real)} is imported already: call nvfp4.te.install() before, "
            "or leave it out"
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        stand_in()
        warnings.warn(f"nvfp4.te stands in for {ROOT} ({VERSION}) from now on", stacklevel=2)

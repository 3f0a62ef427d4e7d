"""``python -m nvfp4.te script.py ARGUMENTS`` and ``python -m nvfp4.te -m module ARGUMENTS``: runs a
program that is written for TransformerEngine on this package.
"""

from __future__ import annotations

import os
import runpy
import sys

from .standin import install

_USAGE = "usage: python -m nvfp4.te (SCRIPT | -m MODULE) [ARGUMENTS]"


def main() -> None:
    """Takes the program from the command line, and runs it as Python would."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        sys.exit(_USAGE)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""The program ``nvfp4``."""

from __future__ import annotations

import os
import signal
import sys

from ._nvfp4 import command


def main() -> int:
    """Runs the command line of this process."""
    # Ctrl-C and closed pipes are the program's to handle, as they are when it runs without Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command([os.path.basename(sys.argv[0]), *sys.argv[1:]], program=True)


if __name__ == "__main__":
    sys.exit(main())

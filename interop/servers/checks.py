"""Runs checks one after the other and counts those that pass."""

import sys
import tempfile
import traceback
from pathlib import Path


def run(checks):
    """Calls every check with a folder of its own, prints what it returns behind its title, and ends the program."""
    failed = 0
    for title, check in checks.items():
        with tempfile.TemporaryDirectory(prefix="nvfp4-servers-") as root:
            try:
                print(f"{title}: {check(Path(root))}", flush=True)
            except Exception as error:
                traceback.print_exc()
                print(f"{title}: {type(error).__name__}: {error}", flush=True)
                failed += 1
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(failed > 0)

"""``python -m nvfp4``: the command line."""

import sys

from ._command import main

sys.exit(main())

"""The command line: one thin function per command; heavy imports are inside it, so that `--help` responds at once."""

import sys

from paceline.errors import INTERRUPTED_EXIT_CODE

try:
    from paceline.cli.main import main
except KeyboardInterrupt:  # During the imports no command can handle it.
    sys.stderr.write("interrupted\n")
    raise SystemExit(INTERRUPTED_EXIT_CODE) from None

__all__ = ["main"]

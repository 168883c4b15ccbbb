"""The command line: one thin function per command, heavy imports inside it, so that `--help` answers at once."""

import sys

from paceline.errors import INTERRUPTED_EXIT_CODE

try:
    from paceline.cli.main import main
except KeyboardInterrupt:  # Before there is a command that could handle it.
    sys.stderr.write("interrupted\n")
    raise SystemExit(INTERRUPTED_EXIT_CODE) from None

__all__ = ["main"]

"""The command line: one request per command. Its methods have the heavy imports, so that `--help` answers at once."""

import sys

from paceline.errors import INTERRUPTED_EXIT_CODE

try:
    from paceline.cli.main import main
except KeyboardInterrupt:  # During the imports no command can handle it.
    sys.stderr.write("interrupted\n")
    raise SystemExit(INTERRUPTED_EXIT_CODE) from None

__all__ = ["main"]

"""The command line: one thin function per command, heavy imports inside it, so that `--help` answers at once."""

from paceline.cli.main import main

__all__ = ["main"]

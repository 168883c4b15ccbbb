"""Console output of commands: messages and errors go to stderr, data to stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from paceline.errors import PacelineError
from paceline.report.terminal.lines import print_line

if TYPE_CHECKING:
    from rich.console import Console


def message_console() -> Console:
    """Return the console for messages, on stderr; rich is imported only here, when a message is printed."""
    from paceline.cli.escaping_console import EscapingConsole

    return EscapingConsole(stderr=True, highlight=False, soft_wrap=True)


def display_console() -> Console:
    """Return the console for live displays, on stderr. Tables are cropped to the terminal, so it wraps no lines."""
    from paceline.cli.escaping_console import EscapingConsole

    return EscapingConsole(stderr=True, highlight=False)


def data_console() -> Console:
    """Return the console for tables, on stdout: as wide as the terminal, or 150 columns in a file or pipe."""
    from paceline.cli.escaping_console import EscapingConsole

    console = EscapingConsole(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else EscapingConsole(highlight=False, width=150)


def print_json(content: Any) -> None:
    """Print the result of a command as JSON, on stdout. NaN and infinity become null."""
    from paceline.records.writer import json_safe

    typer.echo(json.dumps(json_safe(content), indent=2, allow_nan=False))


def message_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a message as one line, without interpreting markup."""
    return lambda text: print_line(console, text)


def show_error(error: PacelineError, console: Console) -> None:
    """Print the traceback in the user's code, if there is one, then the error and its hint."""
    if error.detail:
        console.print(error.detail, markup=False, style="dim")
    console.print(f"error: {error.message}", markup=False)
    if error.hint:
        console.print(f"hint: {error.hint}", markup=False)

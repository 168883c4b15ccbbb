"""What the command line says beside its data: on stderr, errors with their hint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console


def messages() -> Console:
    """Where messages go, apart from data; imported only when there is something to say."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def data_console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for all of a table in a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=150)


def notifier(console: Console) -> Callable[[str], None]:
    """Says one thing a line, as it is."""
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_error(error: PacelineError, console: Console) -> None:
    """What was found, and what to do about it; a traceback of the user's own code goes before both."""
    if error.detail:
        console.print(error.detail, markup=False, style="dim")
    console.print(f"error: {error.message}", markup=False)
    if error.hint:
        console.print(f"hint: {error.hint}", markup=False)

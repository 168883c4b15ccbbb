"""Lines of text in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_line(console: Console, text: str) -> None:
    """Print a sentence as one line, which the terminal itself wraps, without interpreting markup in it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)

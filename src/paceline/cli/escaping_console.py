"""Console that shows control characters as escapes: names, errors and stacks may come from other hosts, or from files.

Otherwise they could move the cursor, change the terminal's title or hide what was printed before.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.formatting import escape_controls


class EscapingConsole(Console):
    """Console whose texts and cells of tables cannot control the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich prints it."""
        return super().render_str(escape_controls(text), **options)

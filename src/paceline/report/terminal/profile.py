"""Terminal table of the operators that took longest, by torch's profiler."""

from __future__ import annotations

from rich.table import Table

from paceline.records import RunRecord
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.figures.machine import OPERATOR_FIGURES
from paceline.report.plots.drawing import shortened
from paceline.report.tables.profile import profile_rows
from paceline.report.terminal.table import column_width, figure_table

TOP = 10
"""Number of operators that the terminal shows."""
SHORTEST_NAME, LONGEST_NAME = 24, 60
"""Characters of an operator's name in a narrow and in a wide terminal."""


def profile_table(run: RunRecord, width: int) -> Table | None:
    """Return the longest operators of the lowest profiled rank; None where nothing was profiled."""
    rows = profile_rows(run)[:TOP]
    if not rows:
        return None
    figures = terminal_columns(OPERATOR_FIGURES, rows)
    room = width - sum(map(column_width, figures))
    longest = max(SHORTEST_NAME, min(LONGEST_NAME, room))
    names = text_column("operator", [shortened(row.name, longest) for row in rows])
    return figure_table([names, *figures], width)

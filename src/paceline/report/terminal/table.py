"""Tables of figures in the terminal: the columns that fit, aligned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from paceline.report.figures.columns import Column

GAP = 2
"""Characters between two columns."""


def figure_table(
    columns: Sequence[Column],
    width: int,
    *,
    styles: Sequence[str | None] = (),
    names: int = 1,
    name_width: int | None = None,
    name_side: Literal["left", "right"] = "left",
    title: str | None = None,
) -> Table:
    """Return a table of the columns that fit; the first `names` columns are names, which are always shown.

    `styles` has a style per row, `name_width` is the least width of the first column.
    """
    kept = fit_columns(columns, width, names)
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    first, *others = kept
    table.add_column(escape(first.heading), justify=name_side, no_wrap=True, min_width=name_width)
    for column in others:
        table.add_column(escape(column.heading), justify="right", no_wrap=True)
    for place, texts in enumerate(zip(*[column.texts for column in kept], strict=True)):
        table.add_row(*map(escape, texts), style=styles[place] if styles else None)
    return table


def fit_columns(columns: Sequence[Column], width: int, names: int = 1) -> list[Column]:
    """Return the columns that fit into the terminal. The page and the JSON output have all of them.

    Columns are dropped one at a time, or with their group: those of the lowest priority first, and of equals the last.
    The most important column of figures stays.
    """
    kept = list(columns)
    while sum(map(column_width, kept)) - GAP > width and len(kept) > names + 1:
        dropped = min(reversed(kept[names:]), key=lambda column: column.priority)
        kept = [
            column for column in kept if column is not dropped and (not column.group or column.group != dropped.group)
        ]
    return kept


def column_width(column: Column) -> int:
    """Return the characters that a column takes, with the gap before it."""
    return GAP + max(map(cell_len, [column.heading, *column.texts]))

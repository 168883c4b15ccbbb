"""Tables of figures in the terminal: the columns that fit, aligned."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from paceline.report.figures.columns import Column

GAP = 2
"""Characters between two columns."""


def figure_table(
    columns: Sequence[Column], width: int, *, styles: Sequence[str | None] = (), names: int = 1, name_width: int = 0
) -> Table:
    """Return a table of the columns that fit; the first `names` columns are names, which are always shown.

    `styles` has a style per row, `name_width` is the least width of the first column.
    """
    kept = fit_columns(columns, width, names)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(kept):
        justify, least = ("left", name_width) if place == 0 and names else ("right", 0)
        table.add_column(escape(column.heading), justify=justify, no_wrap=True, min_width=least or None)  # type: ignore[arg-type]
    for place, texts in enumerate(zip(*[column.texts for column in kept], strict=True)):
        table.add_row(*map(escape, texts), style=styles[place] if styles else None)
    return table


def fit_columns(columns: Sequence[Column], width: int, names: int = 1) -> list[Column]:
    """Return the columns that fit into the terminal. The page and the JSON output have all of them.

    Columns are dropped one at a time, those of the lowest priority first, and of equals the last. The first column of
    figures stays.
    """
    kept = list(columns)
    while sum(map(_width, kept)) - GAP > width and len(kept) > names + 1:
        kept.remove(min(reversed(kept[names:]), key=lambda column: column.priority))
    return kept


def _width(column: Column) -> int:
    return GAP + max(map(cell_len, [column.heading, *column.texts]))

"""Columns of a table, generated from its figures: one unit per column, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

from paceline.analysis.statistics import Estimate
from paceline.formatting import NOTHING, WHOLE, Ladder, Unit, each_repeat, half_width, interval, unit_for
from paceline.report.figures.figure import Figure

R = TypeVar("R")

INTERVAL_HEADING, INTERVAL_PRIORITY = "95% interval", 5
REPEATS_HEADING = "both repeats"
"""Heading of that column where no row has enough repeats for an interval."""


@dataclass(frozen=True)
class Cell:
    """Figure of one row, formatted."""

    text: str
    """Figure without its unit, which is in the heading of the page."""
    sort: float | None = None
    """Value to sort the column by; cells without one are empty and stay last."""
    interval: str = ""
    """Interval, or the values of repeats that are too few for one; empty for a single repeat."""
    share: float | None = None
    """Length of the bar beside the figure, as a share of the longest bar; None for no bar."""
    parts: tuple[float, ...] = ()
    """Shares of the bar, in the order of `PARTS`; empty for a bar of one colour."""
    full: str = ""
    """Figure with its unit, as the terminal shows it; empty for the same as `text`."""


@dataclass(frozen=True)
class Column:
    """Heading, unit, definition and cells of a column, one cell per row."""

    key: str
    heading: str
    unit: Unit
    cells: list[Cell]
    definition: str = ""
    """Key of the definition."""
    priority: int = 10
    """Columns of lower priority are dropped first where the terminal is too narrow."""
    group: str = ""
    """Name shared by columns that are dropped together, since they add up; empty for none."""

    @property
    def is_empty(self) -> bool:
        """Return whether no cell has a value."""
        return all(cell.sort is None for cell in self.cells)

    @property
    def texts(self) -> list[str]:
        """Cells with their units, as the terminal shows them."""
        return [cell.full or cell.text for cell in self.cells]


def page_columns(
    figures: Sequence[Figure[R]], rows: Sequence[R], headings: Mapping[str, str] | None = None
) -> list[Column]:
    """Return the columns of a table on the page; `headings` replaces headings by key."""
    shown = [figure for figure in figures if figure.page and _has_column(figure, figures, rows)]
    return [_page_column(figure, rows, (headings or {}).get(figure.key)) for figure in shown]


def terminal_columns(
    figures: Sequence[Figure[R]], rows: Sequence[R], headings: Mapping[str, str] | None = None
) -> list[Column]:
    """Return the columns of a table in the terminal; `headings` replaces headings by key."""
    found: dict[str, Column] = {}
    for figure in figures:
        if figure.terminal is not None and _has_column(figure, figures, rows):
            for column in _terminal_columns(figure, rows, (headings or {}).get(figure.key)):
                same = found.get(column.heading)
                found[column.heading] = column if same is None else _joined(same, column)
    return list(found.values())


def column_of(figures: Sequence[Figure[R]], key: str, rows: Sequence[R]) -> Column:
    """Return the column of one figure as the terminal shows it, with the unit that suits these rows."""
    (figure,) = [figure for figure in figures if figure.key == key]
    return next(_terminal_columns(figure, rows, None))


def text_column(heading: str, texts: Sequence[str], priority: int = 10) -> Column:
    """Return a column of text for the terminal, such as names."""
    return Column("", heading, WHOLE, [Cell(text) for text in texts], priority=priority)


def _has_column(figure: Figure[R], figures: Sequence[Figure[R]], rows: Sequence[R]) -> bool:
    if any(other.key == figure.in_place_of and not _is_empty(other, rows) for other in figures):
        return False
    return figure.is_always_shown or not _is_empty(figure, rows)


def _is_empty(figure: Figure[R], rows: Sequence[R]) -> bool:
    return all(figure.number(row) in (None, figure.usual) for row in rows)


def _page_column(figure: Figure[R], rows: Sequence[R], heading: str | None) -> Column:
    unit = _unit(figure, rows)
    cells = [_cell(figure, row, unit) for row in rows]
    if figure.bar is not None:
        longest = max([cell.sort for cell in cells if cell.sort is not None], default=0)
        shares = [None if cell.sort is None or not longest else cell.sort / longest for cell in cells]
        cells = [
            replace(cell, share=share, parts=figure.bar(row))
            for cell, share, row in zip(cells, shares, rows, strict=True)
        ]
    return Column(figure.key, heading or figure.heading, unit, cells, figure.defined.key)


def _terminal_columns(figure: Figure[R], rows: Sequence[R], heading: str | None) -> Iterator[Column]:
    assert figure.terminal is not None
    unit, place = _unit(figure, rows), figure.terminal
    units = [_own_unit(figure, row, unit) if figure.has_own_units else unit for row in rows]
    cells = [_cell(figure, row, own) for row, own in zip(rows, units, strict=True)]
    column = Column(
        figure.key,
        heading or place.heading,
        unit,
        cells,
        definition=figure.defined.key,
        priority=place.priority,
        group=figure.unit_of,
    )
    if place.interval == "half width":
        widths = [_half_width(figure, row, unit) for row in rows]
        texts = aligned([column.texts, widths])
        column = replace(column, cells=[replace(cell, full=text) for cell, text in zip(cells, texts, strict=True)])
    yield column
    if place.interval == "column" and any(cell.interval for cell in cells):
        texts = [cell.interval or NOTHING for cell in cells]
        has_interval = any(isinstance(found, Estimate) and found.low is not None for found in map(figure.read, rows))
        yield text_column(INTERVAL_HEADING if has_interval else REPEATS_HEADING, texts, INTERVAL_PRIORITY)


def _joined(first: Column, second: Column) -> Column:
    """Join the cells of two columns with the same heading; where the first has no value, the second is left out."""
    more = ["" if cell.sort is None else text for cell, text in zip(first.cells, second.texts, strict=True)]
    texts = aligned([first.texts, more])
    return replace(first, cells=[replace(cell, full=text) for cell, text in zip(first.cells, texts, strict=True)])


def aligned(parts: Sequence[Sequence[str]]) -> list[str]:
    """Join several parts of each cell, aligned in columns; a part that is empty in all cells is left out."""
    widths = [max(map(len, own), default=0) for own in parts]
    rows = zip(*parts, strict=True)
    return [" ".join(f"{part:>{width}}" for part, width in zip(row, widths, strict=True) if width) for row in rows]


def _unit(figure: Figure[R], rows: Sequence[R]) -> Unit:
    read = attrgetter(figure.unit_of) if figure.unit_of else figure.number
    values = [read(row) for row in rows]
    return unit_for([value for value in values if value is not None], figure.format)


def _own_unit(figure: Figure[R], row: R, otherwise: Unit) -> Unit:
    value = figure.number(row)
    return figure.format.own_unit(value) if isinstance(figure.format, Ladder) and value is not None else otherwise


def _cell(figure: Figure[R], row: R, unit: Unit) -> Cell:
    found, value = figure.read(row), figure.number(row)
    small = None if figure.small_print is None else figure.small_print(row)
    if small is None:
        small = interval_or_repeats(found, unit) if isinstance(found, Estimate) else ""
    if value is None:
        return Cell(NOTHING, interval=small)
    if value == 0 and isinstance(figure.format, Ladder):  # Nothing at all, rather than a little.
        return Cell("0", value, small, full=figure.format.text(value))
    return Cell(unit.write(value), value, small, full=unit.text(value))


def interval_or_repeats(found: Estimate, unit: Unit) -> str:
    """Format the interval of an estimate, or the values of repeats that are too few for one, without the unit."""
    return interval(found.low, found.high, unit) or each_repeat(found.each, unit)


def _half_width(figure: Figure[R], row: R, unit: Unit) -> str:
    found = figure.read(row)
    if not isinstance(found, Estimate):
        return ""
    values = each_repeat(found.each, unit)
    return f"({values})" if values else half_width(found.low, found.high, unit, found.value)

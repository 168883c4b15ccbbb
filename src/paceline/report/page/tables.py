"""Tables of figures as the templates show them: the names of rows, and the columns of their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.report.figures.columns import Column


@dataclass(frozen=True)
class RowLabel:
    """Label of a row besides its name, such as a rank."""

    heading: str
    definition: str
    text: str
    note: str = ""
    """Small print after the text."""
    is_number: bool = True


@dataclass(frozen=True)
class PageRow:
    """Row of a table, without its figures."""

    name: str
    """Name of the candidate or operator, which has a colour where it is a candidate."""
    labels: tuple[RowLabel, ...] = ()
    classes: str = ""
    tag: str = ""
    tag_class: str = ""


@dataclass(frozen=True)
class PageTable:
    """Table of figures, which can be sorted by each of them."""

    id: str
    title: str
    """Description for screen readers."""
    heading: str
    """Heading of the names."""
    rows: Sequence[PageRow]
    columns: Sequence[Column]
    definition: str = "strategy"
    """Key of the definition of the names."""
    classes: str = ""
    is_tall: bool = False
    """Whether it scrolls within its own area, since it may have many rows."""
    is_code: bool = False
    """Whether the names are code, such as names of operators."""
    cell_id: Callable[[str, str], str] | None = None
    """Function (name of the row, key of the column) -> HTML id of the cell; None for cells without."""

    @property
    def labels(self) -> tuple[RowLabel, ...]:
        """Labels of the first row, whose headings are those of all rows."""
        return self.rows[0].labels if self.rows else ()

    def starts_group(self, place: int) -> bool:
        """Return whether the row above it has another name."""
        return place == 0 or self.rows[place - 1].name != self.rows[place].name


def rank_label(rank: int) -> RowLabel:
    """Return the number of a rank."""
    return RowLabel("Rank", "rank", str(rank))

"""Entry of a figure: its key, heading, format and definition, how it is read from a row, and where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from paceline.analysis.statistics import Estimate
from paceline.formatting import Format
from paceline.report.definitions import Definition

R = TypeVar("R")

FigureValue = Estimate | float | None


class Output(StrEnum):
    """Output that can show a figure."""

    TERMINAL = "terminal"
    PAGE = "page"
    CSV = "csv"
    JSON = "json"


@dataclass(frozen=True)
class InTerminal:
    """Column of a figure in the terminal; figures with the same heading share a column."""

    heading: str
    priority: int
    """Columns of lower priority are dropped first where the terminal is too narrow."""
    interval: Literal["omitted", "column", "half width"] = "omitted"
    """Whether the interval is left out, has a column of its own, or follows the figure as half of its width."""


@dataclass(frozen=True, kw_only=True)
class Figure(Generic[R]):
    """One figure of a table. A new figure is one entry here, and the analysis that computes it."""

    key: str
    """Name in CSV and JSON."""
    heading: str
    """Heading on the page, and the term that its definition defines."""
    format: Format
    definition: str | Definition
    """Text of the definition; or a definition that several figures share."""
    value: Callable[[R], FigureValue] | None = None
    """Function that reads it from a row; None for the row's attribute `key`."""
    is_estimate: bool = False
    """Whether its values are estimates with an interval."""
    terminal: InTerminal | None = None
    """Column in the terminal; None if the terminal does not show it."""
    page: bool = True
    csv: bool = True
    json: bool = True
    is_always_shown: bool = False
    """Whether tables have its column also where nothing was measured."""
    unit_of: str = ""
    """Attribute of the row, or path to one, whose column has the unit that this one shares, since they add up; empty
    for its own."""
    has_own_units: bool = False
    """Whether each figure has its own unit in the terminal, since those of a column span orders of magnitude."""
    usual: float | None = None
    """Value that needs no column: tables leave it out where every row has this value."""
    in_place_of: str = ""
    """Key of a figure in whose absence tables show this one; empty if they always do."""
    bar: Callable[[R], tuple[float, ...]] | None = None
    """Parts of the bar that the page shows beside it; None for no bar."""
    small_print: Callable[[R], str | None] | None = None
    """Text that the page shows below it in place of its interval; None for the interval."""

    @property
    def outputs(self) -> frozenset[Output]:
        """Outputs that show it."""
        shown = {
            Output.TERMINAL: self.terminal is not None,
            Output.PAGE: self.page,
            Output.CSV: self.csv,
            Output.JSON: self.json,
        }
        return frozenset(output for output, is_shown in shown.items() if is_shown)

    @property
    def defined(self) -> Definition:
        """Definition of the figure."""
        text = self.definition
        return text if isinstance(text, Definition) else Definition(self.key, self.heading, text)

    def read(self, row: R) -> FigureValue:
        """Return the figure of a row; None where nothing was measured."""
        found: FigureValue = (self.value or attrgetter(self.key))(row)
        return found

    def number(self, row: R) -> float | None:
        """Return the figure of a row without its interval."""
        found = self.read(row)
        return found.value if isinstance(found, Estimate) else found


def figures_of_part(part: str, figures: Iterable[Figure[Any]]) -> tuple[Figure[Any], ...]:
    """Return the figures of one attribute of a row as figures of the row."""
    return tuple(_of_part(part, figure) for figure in figures)


def _of_part(part: str, figure: Figure[Any]) -> Figure[Any]:
    read_part = attrgetter(part)

    def of_part(function: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        return None if function is None else lambda row: function(read_part(row))

    return replace(
        figure,
        value=of_part(figure.read),
        unit_of=f"{part}.{figure.unit_of}" if figure.unit_of else "",
        bar=of_part(figure.bar),
        small_print=of_part(figure.small_print),
    )


def csv_values(figures: Sequence[Figure[R]], row: R) -> dict[str, Any]:
    """Return the figures of a row as plain numbers by key; estimates have two more keys, for their intervals."""
    values: dict[str, Any] = {}
    for figure in (figure for figure in figures if figure.csv):
        found = figure.read(row)
        values[figure.key] = figure.number(row)
        if figure.is_estimate:
            values[f"{figure.key}_low"] = found.low if isinstance(found, Estimate) else None
            values[f"{figure.key}_high"] = found.high if isinstance(found, Estimate) else None
    return values


def json_values(figures: Sequence[Figure[R]], row: R) -> dict[str, Any]:
    """Return the figures of a row as JSON data by key."""
    found = {figure.key: figure.read(row) for figure in figures if figure.json}
    return {key: value.to_dict() if isinstance(value, Estimate) else value for key, value in found.items()}


def definitions(*entries: Iterable[Definition] | Iterable[Figure[Any]]) -> dict[str, Definition]:
    """Return the definitions of terms and of the figures on a page, by key."""
    found: dict[str, Definition] = {}
    for entry in (entry for own in entries for entry in own):
        if isinstance(entry, Definition) or entry.page:
            defined = entry if isinstance(entry, Definition) else entry.defined
            assert found.setdefault(defined.key, defined) == defined, f"two definitions of {defined.key}"
    return found

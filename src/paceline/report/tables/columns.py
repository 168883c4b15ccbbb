"""The tables of the page: columns in one unit each, cells that align, and what to sort them by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.analysis.comparison import CandidateRow
from paceline.analysis.ranks import RankRow
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.report.definitions import DEFINITIONS
from paceline.report.plots.drawing import shortened

NOTHING = "–"
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
MOST_DECIMALS = 4


class Unit(NamedTuple):
    """How all figures of one column are written."""

    scale: float
    name: str
    decimals: int

    def write(self, value: float) -> str:
        """A figure without its unit, which the heading has."""
        return _signed(f"{value / self.scale:,.{self.decimals}f}")

    def write_end(self, value: float) -> str:
        """An end of an interval: briefly, where it is so far off that its digits say nothing."""
        for limit, name in ((1e6, "M"), (1e4, "k")):
            if abs(value / self.scale) >= limit and self.decimals:
                return _signed(f"{value / self.scale / limit * (10 if name == 'k' else 1):,.0f} {name}")
        return self.write(value)


def _signed(text: str) -> str:
    """With a minus sign that is as wide as a digit."""
    return text.replace("-", "−")


PLAIN = Unit(1, "", 4)
FACTOR = Unit(1, "", 2)
WHOLE = Unit(1, "", 0)


def unit_for(values: Iterable[float], ladder: Sequence[tuple[float, str]]) -> Unit:
    """The unit that suits most of a column's figures, and as many decimals as the least of them needs."""
    positive = sorted(value for value in values if value > 0 and math.isfinite(value))
    if not positive:
        return Unit(1, "", 0)
    middle = positive[len(positive) // 2]
    scale, name = next((step for step in ladder if middle >= 0.9995 * step[0]), ladder[-1])
    if scale == 1 and name == "B":
        return Unit(scale, name, 0)
    magnitude = math.floor(math.log10(positive[0] / scale))
    return Unit(scale, name, min(MOST_DECIMALS, max(0, 2 - magnitude if magnitude < 1 else 3 - magnitude)))


def percent_unit(decimals: int) -> Unit:
    """Shares of one, written as per cent."""
    return Unit(0.01, "%", decimals)


@dataclass(frozen=True)
class PageCell:
    """A figure as the page shows it."""

    text: str
    sort: float | None = None
    """What the column is sorted by; cells without stay last."""
    interval: str = ""
    share: float | None = None
    """The length of the bar beside it, of the longest one."""
    parts: tuple[float, ...] = ()
    """Shares of the bar, in the order of `PARTS`; none where it is of one piece."""


@dataclass(frozen=True)
class PageColumn:
    """A column's heading, definition and cells, one per row."""

    key: str
    heading: str
    unit: str
    definition: str
    cells: list[PageCell]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show in it."""
        return all(cell.sort is None for cell in self.cells)


def comparison_columns(rows: Sequence[CandidateRow], reference: str | None) -> list[PageColumn]:
    """Every figure of the comparison table; a column that nothing was measured for is left out, but never the time."""
    percent = percent_unit(1)
    columns = [
        _times(rows),
        _estimates("ratio", f"÷ {shortened(reference or NOTHING, 18)}", rows, FACTOR),
        *_split(rows),
        plain_column("busiest_sent_bytes", "Sent per step", rows, SIZES),
        _estimates("samples_per_s", "Samples per second", rows, WHOLE),
        _estimates("train_loss", "Train loss", rows, PLAIN),
        _estimates("test_loss", "Test loss", rows, PLAIN),
        _estimates("test_accuracy", "Test accuracy", rows, percent),
        plain_column("peak_bytes", "Peak memory", rows, SIZES),
        _estimates("staleness", "Age of gradients", rows, Unit(1, "", 1)),
        _estimates("over_limit_share", "Late", rows, percent),
    ]
    return [column for column in columns if column.key == "step_s" or not column.is_empty]


def _times(rows: Sequence[CandidateRow]) -> PageColumn:
    """The time per iteration, whose bar shows the time split where that was measured."""
    column = _estimates("step_s", "Median time per iteration", rows, TIMES, bars=True)
    parts = [() if row.split is None else tuple(row.split.mean.share(part) for part in PARTS) for row in rows]
    cells = [replace(cell, parts=own) for cell, own in zip(column.cells, parts, strict=True)]
    return replace(column, cells=cells)


def _split(rows: Sequence[CandidateRow]) -> list[PageColumn]:
    """Where the step goes, as measured; without events, what is known from the bound alone."""
    if all(row.split is None for row in rows):
        return [_estimates("above_bound", "Above the bound", rows, percent_unit(0))]
    computing = [None if row.split is None else row.split.compute for row in rows]
    return [
        estimate_column("compute", "Compute", computing, percent_unit(0), definition="split_compute"),
        _estimates("exposed", "Exposed", rows, percent_unit(0), definition="split_exposed"),
    ]


def rank_columns(rows: Sequence[RankRow]) -> list[PageColumn]:
    """Every figure of the table of ranks but the rank itself; the phases share a unit, since they add up."""
    phase = unit_for([row.step_s for row in rows if row.step_s is not None], TIMES)
    columns = [
        plain_column("samples", "Samples", rows, WHOLE),
        plain_column("average_loss", "Average loss", rows, PLAIN),
        plain_column("accuracy", "Train accuracy", rows, percent_unit(1)),
        plain_column("first_step_s", "First step", rows, phase),
        plain_column("step_s", "Mean step", rows, phase, definition="rank_step_s"),
        *[
            plain_column(key, DEFINITIONS[key].term, rows, phase)
            for key in ("data_s", "forward_s", "backward_s", "update_s")
        ],
        plain_column("cpu_share", "CPU", rows, percent_unit(0)),
        plain_column("resident_bytes", "Resident memory", rows, SIZES),
        plain_column("peak_bytes", "Peak memory", rows, SIZES),
        plain_column("device_bytes", "GPU memory", rows, SIZES),
        plain_column("device_used_bytes", "GPU in use", rows, SIZES),
        *_collections(rows),
        plain_column("sent_bytes", "Sent", rows, SIZES),
        plain_column("received_bytes", "Received", rows, SIZES),
    ]
    return [column for column in columns if column.key == "samples" or not column.is_empty]


def _collections(rows: Sequence[RankRow]) -> list[PageColumn]:
    """Garbage collections, where there were any."""
    if not any(row.collections for row in rows):
        return []
    count = plain_column("collections", "Collections", rows, WHOLE)
    return [count, plain_column("collection_s", "Collecting", rows, TIMES)]


def _estimates(
    key: str,
    heading: str,
    rows: Sequence[Any],
    how: Unit | Sequence[tuple[float, str]],
    *,
    bars: bool = False,
    definition: str | None = None,
) -> PageColumn:
    """A column of figures with intervals."""
    estimates = [getattr(row, key) for row in rows]
    return estimate_column(key, heading, estimates, how, bars=bars, definition=definition)


def estimate_column(
    key: str,
    heading: str,
    estimates: Sequence[Estimate | None],
    how: Unit | Sequence[tuple[float, str]],
    *,
    bars: bool = False,
    definition: str | None = None,
) -> PageColumn:
    """A column of these figures, with their intervals."""
    values = [estimate.value for estimate in estimates if estimate is not None]
    unit = how if isinstance(how, Unit) else unit_for(values, how)
    longest = max(values, default=0) if bars else 0
    cells = [_estimate_cell(estimate, unit, longest) for estimate in estimates]
    return PageColumn(key, heading, unit.name, definition or key, cells)


def _estimate_cell(estimate: Estimate | None, unit: Unit, longest: float) -> PageCell:
    if estimate is None:
        return PageCell(NOTHING)
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = interval_text(unit.write_end(estimate.low), unit.write_end(estimate.high))
    share = estimate.value / longest if longest else None
    return PageCell(unit.write(estimate.value), estimate.value, interval, share)


def interval_text(low: str, high: str) -> str:
    """Both ends of an interval; words keep apart what two minus signs and a dash would run together."""
    return f"{low} to {high}" if low.startswith("−") else f"{low}–{high}"


def plain_column(
    key: str,
    heading: str,
    rows: Sequence[Any],
    how: Unit | Sequence[tuple[float, str]],
    *,
    definition: str | None = None,
) -> PageColumn:
    """A column of figures without intervals."""
    values: list[float | None] = [getattr(row, key) for row in rows]
    unit = how if isinstance(how, Unit) else unit_for([value for value in values if value is not None], how)
    write: Callable[[float], str] = unit.write
    cells = [PageCell(NOTHING) if value is None else PageCell(write(value), value) for value in values]
    return PageColumn(key, heading, unit.name, definition or key, cells)

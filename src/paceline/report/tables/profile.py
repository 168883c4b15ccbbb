"""Time per operator, measured by torch's profiler: tables for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from paceline.config import step_range
from paceline.errors import UsageError
from paceline.records import RunRecord
from paceline.records.profile import Operator, Profile
from paceline.report.formatting import percent, plural, seconds
from paceline.report.plots.drawing import shortened
from paceline.report.tables.columns import NOTHING, TIMES, PageCell, PageColumn, Unit, percent_unit, unit_for

TOP = 10
"""Number of operators that the terminal shows."""
LONGEST_NAME = 60


@dataclass(frozen=True)
class ProfileRow:
    """Operator on one rank; figures are per step."""

    name: str
    calls: float
    self_cpu_s: float
    cpu_s: float | None
    self_device_s: float | None
    """None where no GPU did any work, like `device_s`."""
    device_s: float | None
    share: float
    """Share of the own time of all operators: GPU time where a GPU did the work, else CPU time."""


def profile_rows(run: RunRecord, rank: int | None = None) -> list[ProfileRow]:
    """Return the operators of a rank (None: the lowest profiled one), longest first; empty without a profile."""
    profile = _profile_of(run, rank)
    if profile is None:
        return []
    operators = [*profile.operators, *([] if profile.rest is None else [profile.rest])]
    whole = sum(_self_s(operator, profile) for operator in operators)
    return [_row(operator, profile, whole) for operator in operators]


def profile_columns(rows: Sequence[ProfileRow]) -> list[PageColumn]:
    """Return the columns of the table of operators, without names; GPU columns only where a GPU did the work."""
    unit = unit_for([row.self_device_s or row.self_cpu_s for row in rows], TIMES)
    whole = Unit(1, "", 0 if all(row.calls == int(row.calls) for row in rows) else 1)
    figures: list[tuple[str, str, Unit, Callable[[ProfileRow], float | None]]] = [
        ("profile_calls", "Calls", whole, lambda row: row.calls),
        ("profile_share", "Share", percent_unit(1), lambda row: row.share),
        ("profile_self_cpu_s", "Self CPU", unit, lambda row: row.self_cpu_s),
        ("profile_cpu_s", "Total CPU", unit, lambda row: row.cpu_s),
        ("profile_self_device_s", "Self GPU", unit, lambda row: row.self_device_s),
        ("profile_device_s", "Total GPU", unit, lambda row: row.device_s),
    ]
    columns = [
        PageColumn(key, heading, how.name, key, [_cell(value(row), how) for row in rows])
        for key, heading, how, value in figures
    ]
    return [column for column in columns if not column.is_empty]


def profile_table(run: RunRecord) -> Table | None:
    """Return the longest operators of the lowest profiled rank for the terminal; None where nothing was profiled."""
    rows = profile_rows(run)
    if not rows:
        return None
    on_gpu = any(row.self_device_s for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operator")
    for heading in ("calls/step", "share", "self CPU", "total CPU", *(("self GPU", "total GPU") if on_gpu else ())):
        table.add_column(heading, justify="right")
    for row in rows[:TOP]:
        device = (seconds(row.self_device_s), seconds(row.device_s)) if on_gpu else ()
        figures = (f"{row.calls:g}", percent(row.share), seconds(row.self_cpu_s), seconds(row.cpu_s), *device)
        table.add_row(Text(shortened(row.name, LONGEST_NAME)), *figures)
    return table


def profile_sentences(run: RunRecord) -> Iterator[str]:
    """Yield which steps were profiled, and which requested ones were not."""
    requested = _requested_steps(run)
    profile = _profile_of(run, None)
    if profile is not None:
        rank = min(run.profiles)
        traces = f"{plural(len(run.profiles), 'trace')} for Perfetto in the record's folder"
        yield (
            f"{_format_steps(range(profile.first_step, profile.last_step + 1))} of rank {rank} ran under torch's "
            f"profiler, {seconds(profile.step_s)} each, which no other figure counts; {traces}"
        )
    done = range(0) if profile is None else range(profile.first_step, profile.last_step + 1)
    if len(done) < len(requested):
        missing = requested[len(done) :]
        yield f"{_format_steps(missing)} could not be profiled: the run ended before that"


def _requested_steps(run: RunRecord) -> range:
    text = run.config.get("profile")
    try:
        return step_range(str(text), "profile") if text else range(0)
    except UsageError:  # Another version wrote the record in another format.
        return range(0)


def _format_steps(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _profile_of(run: RunRecord, rank: int | None) -> Profile | None:
    if not run.profiles:
        return None
    return run.profiles.get(min(run.profiles) if rank is None else rank)


def _self_s(operator: Operator, profile: Profile) -> float:
    return operator.self_device_s if profile.on_device else operator.self_cpu_s


def _row(operator: Operator, profile: Profile, whole: float) -> ProfileRow:
    return ProfileRow(
        name=operator.name,
        calls=operator.calls,
        self_cpu_s=operator.self_cpu_s,
        cpu_s=operator.cpu_s,
        self_device_s=operator.self_device_s if profile.on_device else None,
        device_s=operator.device_s if profile.on_device else None,
        share=_self_s(operator, profile) / whole if whole else 0.0,
    )


def _cell(value: float | None, unit: Unit) -> PageCell:
    return PageCell(NOTHING) if value is None else PageCell(unit.write(value), value)

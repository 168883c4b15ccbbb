"""What torch's profiler found, operator by operator: for the terminal and for the page."""

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
"""Operators that the terminal shows."""
LONGEST_NAME = 60


@dataclass(frozen=True)
class ProfileRow:
    """An operator on one rank; figures are per step."""

    name: str
    calls: float
    self_cpu_s: float
    cpu_s: float | None
    self_device_s: float | None
    """None where no GPU did any work, as the other one."""
    device_s: float | None
    share: float
    """Of the time of all operators themselves: on the GPU, where one did the work."""


def profile_rows(run: RunRecord, rank: int | None = None) -> list[ProfileRow]:
    """The operators of one rank (the lowest that has a profile), those that took most time first; none without one."""
    profile = _profile_of(run, rank)
    if profile is None:
        return []
    operators = [*profile.operators, *([] if profile.rest is None else [profile.rest])]
    whole = sum(_own_s(operator, profile) for operator in operators)
    return [_row(operator, profile, whole) for operator in operators]


def profile_columns(rows: Sequence[ProfileRow]) -> list[PageColumn]:
    """The columns of a table of operators but for their names; those of a GPU only where one did the work."""
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
    """The operators of the lowest rank that took most time; None where nothing was profiled."""
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
    """Which steps were profiled, and which were not though they were asked for."""
    asked = _asked(run)
    profile = _profile_of(run, None)
    if profile is not None:
        rank = min(run.profiles)
        traces = f"{plural(len(run.profiles), 'trace')} beside it, for Perfetto"
        yield (
            f"{_named(range(profile.first_step, profile.last_step + 1))} of rank {rank} under torch's profiler, "
            f"{seconds(profile.step_s)} each, which is not counted; {traces}"
        )
    done = range(0) if profile is None else range(profile.first_step, profile.last_step + 1)
    if len(done) < len(asked):
        missing = asked[len(done) :]
        yield f"{_named(missing)} could not be profiled: the run ended before"


def _asked(run: RunRecord) -> range:
    text = run.config.get("profile")
    try:
        return step_range(str(text), "profile") if text else range(0)
    except UsageError:  # Of a version that writes it in another way.
        return range(0)


def _named(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _profile_of(run: RunRecord, rank: int | None) -> Profile | None:
    if not run.profiles:
        return None
    return run.profiles.get(min(run.profiles) if rank is None else rank)


def _own_s(operator: Operator, profile: Profile) -> float:
    return operator.self_device_s if profile.on_device else operator.self_cpu_s


def _row(operator: Operator, profile: Profile, whole: float) -> ProfileRow:
    return ProfileRow(
        name=operator.name,
        calls=operator.calls,
        self_cpu_s=operator.self_cpu_s,
        cpu_s=operator.cpu_s,
        self_device_s=operator.self_device_s if profile.on_device else None,
        device_s=operator.device_s if profile.on_device else None,
        share=_own_s(operator, profile) / whole if whole else 0.0,
    )


def _cell(value: float | None, unit: Unit) -> PageCell:
    return PageCell(NOTHING) if value is None else PageCell(unit.write(value), value)

"""What processes and hosts used, beside the curves: a table of hosts for the page, and all of it for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.resources import host_usage, usage
from paceline.records import RunRecord
from paceline.report.tables.columns import SIZES, PageColumn, percent_unit, plain_column
from paceline.report.tables.profile import profile_rows


@dataclass(frozen=True)
class HostRow:
    """A host in the first repeat of a candidate."""

    candidate: str
    host: int
    busy: float | None
    cpu_share: float | None
    resident_bytes: float | None
    used_bytes: float | None
    available_bytes: float | None


def host_rows(comparison: Comparison) -> list[HostRow]:
    """One per candidate and host that was sampled."""
    return [
        HostRow(name, own.host, own.busy, own.cpu_share, own.resident_bytes, own.used_bytes, own.available_bytes)
        for name, run in first_runs(comparison).items()
        for own in host_usage(run)
    ]


def host_columns(rows: Sequence[HostRow]) -> list[PageColumn]:
    """Every figure of a host but its number."""
    columns = [
        plain_column("busy", "Busy", rows, percent_unit(0), definition="host_busy"),
        plain_column("cpu_share", "CPU of its ranks", rows, percent_unit(0), definition="host_cpu_share"),
        plain_column("resident_bytes", "Memory of its ranks", rows, SIZES, definition="host_resident_bytes"),
        plain_column("used_bytes", "Memory in use", rows, SIZES, definition="host_used_bytes"),
        plain_column("available_bytes", "Memory left", rows, SIZES, definition="host_available_bytes"),
    ]
    return [column for column in columns if not column.is_empty]


def first_runs(comparison: Comparison) -> dict[str, RunRecord]:
    """The first repeat of every candidate that has one, best first."""
    runs = {row.candidate.name: comparison.record_set.runs_of(row.candidate.name) for row in comparison.rows}
    return {name: own[min(own)] for name, own in runs.items() if own}


def sampling_share(comparison: Comparison) -> float | None:
    """What sampling took of a core, on the rank where it took most; None where nothing was sampled."""
    used = [own.sampler_share for entry in comparison.record_set.runs for own in usage(entry.run)]
    return max((share for share in used if share is not None), default=None)


def usage_json(run: RunRecord) -> dict[str, Any]:
    """What the ranks and the hosts of a run used, for scripts."""
    ranks, hosts = [asdict(own) for own in usage(run)], [asdict(own) for own in host_usage(run)]
    return {"ranks": ranks, "hosts": hosts}


def run_json(run: RunRecord) -> dict[str, Any]:
    """What the summary of a run leaves out, for scripts: operators of the lowest rank that has them, and resources."""
    return {"operators": [asdict(row) for row in profile_rows(run)], "resources": usage_json(run)}

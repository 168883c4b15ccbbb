"""Resource use of processes and hosts: rows of the table of hosts, and the complete data as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.resources import host_usage, usage
from paceline.records import RunRecord
from paceline.report.tables.profile import profile_rows


@dataclass(frozen=True)
class HostRow:
    """Resource use of a host in the first repeat of a candidate."""

    candidate: str
    host: int
    busy: float | None
    cpu_share: float | None
    resident_bytes: float | None
    used_bytes: float | None
    available_bytes: float | None


def host_rows(comparison: Comparison) -> list[HostRow]:
    """Return one row per candidate and host that was sampled."""
    return [
        HostRow(name, own.host, own.busy, own.cpu_share, own.resident_bytes, own.used_bytes, own.available_bytes)
        for name, run in first_runs(comparison).items()
        for own in host_usage(run)
    ]


def first_runs(comparison: Comparison) -> dict[str, RunRecord]:
    """Return the first repeat of every candidate that has one, best first."""
    runs = {row.candidate.name: comparison.record_set.runs_of(row.candidate.name) for row in comparison.rows}
    return {name: own[min(own)] for name, own in runs.items() if own}


def sampling_share(comparison: Comparison) -> float | None:
    """Return the highest share of a core that sampling used on any rank; None where nothing was sampled."""
    used = [own.sampler_share for entry in comparison.record_set.runs for own in usage(entry.run)]
    return max((share for share in used if share is not None), default=None)


def usage_json(run: RunRecord) -> dict[str, Any]:
    """Return the resource use of the ranks and hosts of a run as JSON data."""
    ranks, hosts = [asdict(own) for own in usage(run)], [asdict(own) for own in host_usage(run)]
    return {"ranks": ranks, "hosts": hosts}


def run_json(run: RunRecord) -> dict[str, Any]:
    """Return JSON data that a run's summary lacks: operators of the lowest profiled rank, and resource use."""
    return {"operators": [asdict(row) for row in profile_rows(run)], "resources": usage_json(run)}

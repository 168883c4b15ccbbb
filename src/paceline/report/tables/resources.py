"""Resource use of hosts: rows of their table, and the runs that it and the operators are from."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.comparison import Comparison
from paceline.analysis.resources import HostUsage, host_usage, usage
from paceline.records import RunRecord


@dataclass(frozen=True)
class HostRow:
    """Resource use of a host in the first repeat of a candidate."""

    candidate: str
    usage: HostUsage


def host_rows(comparison: Comparison) -> list[HostRow]:
    """Return one row per candidate and host that was sampled."""
    return [HostRow(name, own) for name, run in first_runs(comparison).items() for own in host_usage(run)]


def first_runs(comparison: Comparison) -> dict[str, RunRecord]:
    """Return the first repeat of every candidate that has one, best first."""
    runs = {row.candidate.name: comparison.record_set.runs_of(row.candidate.name) for row in comparison.rows}
    return {name: own[min(own)] for name, own in runs.items() if own}


def sampling_share(comparison: Comparison) -> float | None:
    """Return the highest share of a core that sampling used on any rank; None where nothing was sampled."""
    used = [own.sampler_share for entry in comparison.record_set.runs for own in usage(entry.run)]
    return max((share for share in used if share is not None), default=None)


def comparing_replicas_share(comparison: Comparison) -> float | None:
    """Return the largest share of a run's training time that comparing its replicas took; None without any."""
    summaries = [entry.run.summary for entry in comparison.record_set.runs]
    shares = [own.replicas.share for own in summaries if own is not None and own.replicas is not None]
    return max((share for share in shares if share is not None), default=None)


def profiled_runs(comparison: Comparison) -> dict[str, RunRecord]:
    """Return the first profiled repeat of every candidate that has one, best first."""
    names = [row.candidate.name for row in comparison.rows]
    runs = {name: comparison.record_set.runs_of(name) for name in names}
    profiled = {name: [own[repeat] for repeat in sorted(own) if own[repeat].profiles] for name, own in runs.items()}
    return {name: own[0] for name, own in profiled.items() if own}

"""Length of a run, hosts and candidates of an experiment, and what became of a candidate, as text."""

from __future__ import annotations

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.remaining_time import RemainingTime
from paceline.config import RunConfig
from paceline.config.emulation import format_hosts, parse_hosts
from paceline.errors import UsageError
from paceline.formatting import format_cores, plural, rough_range, short_seconds
from paceline.records.experiment.design import Design

WARM_UP_COUNTS = "warm-up steps included: fewer than 6 steps"
"""Remark on runs that are too short for means without the warm-up steps."""


def compares_strategies(comparison: Comparison) -> bool:
    """Return whether the candidates are strategies; otherwise they are settings of one strategy."""
    candidates = comparison.record_set.candidates
    return len({candidate.strategy for candidate in candidates}) > 1 or not any(c.settings for c in candidates)


def outcome(row: CandidateRow) -> str:
    """Return a remark on a candidate that failed or has diverged; empty for others."""
    if row.failure is not None:
        return "diverged" if row.is_stopped_by_divergence else "failed"
    if not row.diverged:
        return ""
    return "diverged" if len(row.diverged) >= row.repeats else f"{len(row.diverged)} of {row.repeats} diverged"


def run_length(config: RunConfig) -> str:
    """Format the length of a run: steps, epochs or seconds."""
    if config.steps is None and config.epochs is None and config.seconds is not None:
        return short_seconds(config.seconds)
    length = plural(config.steps, "step") if config.steps else plural(config.epochs or 1, "epoch")
    return length if config.seconds is None else f"{length}, {short_seconds(config.seconds)} at most,"


def on_hosts(design: Design) -> str:
    """Format the hosts of an experiment as a suffix to its ranks; empty for a single host."""
    hosts, spec, share = design.hosts, design.emulated, design.host_cpus
    if spec is None:
        return f" on {plural(hosts, 'host')}" if hosts > 1 else ""
    try:
        what = format_hosts(parse_hosts(spec))
    except UsageError:  # The record was edited, or a newer version wrote it.
        what = plural(hosts, "emulated host")
    return f" on {what}" + ("" if share is None else f", {format_cores(share)} each")


def format_remaining(remaining: RemainingTime) -> str:
    """Format an estimated time as a range, with its end if the largest number of repeats is needed."""
    between, longest = rough_range(remaining.low_s, remaining.high_s), rough_range(0.0, remaining.most_s)
    if remaining.most_s <= 1.1 * remaining.high_s:
        return between
    return f"{between} ({longest} if the result is close)" if remaining.high_s else longest

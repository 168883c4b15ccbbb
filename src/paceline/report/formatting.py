"""Number formatting, the same in the terminal, on pages and in messages."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.config.emulation import format_hosts, parse_hosts
from paceline.errors import UsageError
from paceline.records.experiment import Design

WARM_UP_COUNTS = "warm-up steps included: fewer than 6 steps"
"""Remark on runs that are too short for means without the warm-up steps."""


def number(value: float | None) -> str:
    """Format a loss or another figure without a unit."""
    return "–" if value is None else f"{value:.4f}"


def percent(share: float | None, decimals: int = 1) -> str:
    """Format a share of one as per cent."""
    return "–" if share is None else f"{100 * share:.{decimals}f}%"


def seconds(value: float | None) -> str:
    """Format a duration, with a unit that suits it."""
    if value is None:
        return "–"
    if value < 0.999995:  # A value that rounds to 1000.00 ms is written as 1.00 s.
        return f"{1000 * value:.2f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min" if value >= 3600 else f"{value / 60:.1f} min"


def roughly(value: float) -> str:
    """Format an estimated duration, rounded."""
    if value < 90:
        return f"{max(5, 5 * round(value / 5))} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def count(value: int) -> str:
    """Format a large count, rounded."""
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= 0.99995 * limit:  # A value that rounds up to the next unit is written in it.
            return f"{value / limit:.1f} {unit}"
    return str(value)


def plural(value: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def run_length(config: RunConfig) -> str:
    """Format the length of a run: steps, epochs or seconds."""
    if config.steps is None and config.epochs is None and config.seconds is not None:
        return f"{config.seconds:g} s"
    length = plural(config.steps, "step") if config.steps else plural(config.epochs or 1, "epoch")
    return length if config.seconds is None else f"{length}, {config.seconds:g} s at most,"


def on_hosts(design: Design) -> str:
    """Format the hosts of an experiment as a suffix to its ranks; empty for a single host."""
    hosts, spec, share = design.hosts, design.emulated, design.host_cpus
    if spec is None:
        return f" on {plural(hosts, 'host')}" if hosts > 1 else ""
    try:
        what = format_hosts(parse_hosts(spec))
    except UsageError:  # The record was edited, or a newer version wrote it.
        what = plural(hosts, "emulated host")
    return f" on {what}" + ("" if share is None else f", {share:g} cores each")


def size(value: float | None) -> str:
    """Format a number of bytes in decimal units, as is usual for networks."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.{2 if value < 9.995 * limit else 1}f} {unit}"
    return f"{value:.0f} B"


def factor(value: float | None) -> str:
    """Format a ratio."""
    return "–" if value is None else f"{value:.2f}×"


def time_range(low: float | None, high: float | None, *, around: float | None = None) -> str:
    """Format an interval of durations, both ends in the unit that suits the value `around`."""
    if low is None or high is None:
        return ""
    scale, unit = (1000, "ms") if (high if around is None else around) < 0.999995 else (1, "s")
    decimals = 2 if high * scale < 100 else 1
    return f"{scale * low:.{decimals}f}–{scale * high:.{decimals}f} {unit}"


def join_names(names: list[str]) -> str:
    """Join names for a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

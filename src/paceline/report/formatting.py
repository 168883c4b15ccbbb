"""How numbers are written, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import RunConfig
from paceline.config.emulation import format_hosts, parse_hosts
from paceline.errors import UsageError

WARM_UP_COUNTS = "warm-up steps included: fewer than 6 steps"
"""What is said where a run was too short for means without them."""


def number(value: float | None) -> str:
    """A loss or another plain figure."""
    return "–" if value is None else f"{value:.4f}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share of one."""
    return "–" if share is None else f"{100 * share:.{decimals}f}%"


def seconds(value: float | None) -> str:
    """A duration, with the unit that suits it."""
    if value is None:
        return "–"
    if value < 0.999995:  # What rounds to a second is one.
        return f"{1000 * value:.2f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min" if value >= 3600 else f"{value / 60:.1f} min"


def roughly(value: float) -> str:
    """A duration that is only guessed."""
    if value < 90:
        return f"{max(5, 5 * round(value / 5))} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def count(value: int) -> str:
    """A large count, rounded."""
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= 0.99995 * limit:  # What rounds to the next unit has it.
            return f"{value / limit:.1f} {unit}"
    return str(value)


def plural(value: int, noun: str) -> str:
    """A count with its noun."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def run_length(config: RunConfig) -> str:
    """How long a run lasts."""
    if config.steps is None and config.epochs is None and config.seconds is not None:
        return f"{config.seconds:g} s"
    length = plural(config.steps, "step") if config.steps else plural(config.epochs or 1, "epoch")
    return length if config.seconds is None else f"{length}, {config.seconds:g} s at most,"


def on_hosts(design: Mapping[str, Any]) -> str:
    """The hosts of an experiment, to put behind its ranks; nothing for a single one."""
    hosts, spec, share = design.get("hosts") or 1, design.get("emulated"), design.get("host_cpus")
    if spec is None:
        return f" on {plural(hosts, 'host')}" if hosts > 1 else ""
    try:
        what = format_hosts(parse_hosts(spec))
    except UsageError:  # Of a record that was tampered with, or is newer than we are.
        what = plural(hosts, "emulated host")
    return f" on {what}" + ("" if share is None else f", {share:g} cores each")


def size(value: float | None) -> str:
    """A number of bytes, in the decimal units that networks are sold in."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.{2 if value < 9.995 * limit else 1}f} {unit}"
    return f"{value:.0f} B"


def factor(value: float | None) -> str:
    """How many times something is something else."""
    return "–" if value is None else f"{value:.2f}×"


def time_range(low: float | None, high: float | None, *, around: float | None = None) -> str:
    """An interval of durations, both ends in the unit of the value that it is around."""
    if low is None or high is None:
        return ""
    scale, unit = (1000, "ms") if (high if around is None else around) < 0.999995 else (1, "s")
    decimals = 2 if high * scale < 100 else 1
    return f"{scale * low:.{decimals}f}–{scale * high:.{decimals}f} {unit}"


def listed(names: list[str]) -> str:
    """Names as a sentence has them: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

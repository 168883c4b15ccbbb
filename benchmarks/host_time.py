"""Host time of a step: operations and CUDA calls by torch's profiler, and Python functions by cProfile, of two loops.

Both profilers slow the host down, so their times are larger than in a step, but comparable between the loops.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

STEPS = 40
"""Steps that are profiled."""
MOST_SHOWN = 25

Train = Callable[[int], float]


@dataclass(frozen=True)
class HostTime:
    """Calls of one name in a step of each loop."""

    name: str
    base_calls: float
    calls: float
    base_us: float
    """Time per step, without that of calls inside, in the loop that the other is compared with."""
    us: float
    """Time per step, without that of calls inside."""


def operation_times(base: Train, other: Train) -> list[HostTime]:
    """Return the operations of both loops, and on a GPU their CUDA calls; the largest difference in time first."""
    return _paired(_operations(base), _operations(other))


def function_times(base: Train, other: Train) -> list[HostTime]:
    """Return the functions that both loops call in their main thread; the largest difference in time first.

    On a GPU the operations of a backward pass run in another thread; `run_backward` is the wait for them.
    """
    return _paired(_functions(base), _functions(other))


def _operations(train: Train) -> dict[str, tuple[float, float]]:
    train(STEPS)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        train(STEPS)
    return {
        event.key: (event.count / STEPS, event.self_cpu_time_total / STEPS)
        for event in profiler.key_averages()
        if event.self_cpu_time_total
    }


def _functions(train: Train) -> dict[str, tuple[float, float]]:
    train(STEPS)
    profiler = cProfile.Profile()
    profiler.enable()
    train(STEPS)
    profiler.disable()
    found: dict[str, tuple[float, float]] = {}
    for (file, line, function), (_, calls, own_s, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        name = function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"
        found[name] = calls / STEPS, own_s / STEPS * 1e6
    return found


def _paired(base: Mapping[str, tuple[float, float]], other: Mapping[str, tuple[float, float]]) -> list[HostTime]:
    none = 0.0, 0.0
    found = []
    for name in base.keys() | other.keys():
        (base_calls, base_us), (calls, us) = base.get(name, none), other.get(name, none)
        found.append(HostTime(name, base_calls, calls, base_us, us))
    return sorted(found, key=lambda time: -abs(time.us - time.base_us))


def show_host(times: Sequence[HostTime], title: str, console: Console) -> None:
    """Print the names whose times differ most between the loops, and the sum of all."""
    table = Table("name", title=title, title_justify="left")
    for heading in ("calls, base", "calls", "µs, base", "µs", "difference"):
        table.add_column(heading, justify="right")
    sums = torch.tensor([(time.base_calls, time.calls, time.base_us, time.us) for time in times]).sum(0).tolist()
    total = HostTime("all", *sums)
    for time in (total, *times[:MOST_SHOWN]):
        calls = f"{time.base_calls:.1f}", f"{time.calls:.1f}"
        table.add_row(time.name[:80], *calls, f"{time.base_us:.1f}", f"{time.us:.1f}", f"{time.us - time.base_us:+.1f}")
    console.print(table)

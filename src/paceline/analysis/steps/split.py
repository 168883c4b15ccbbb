"""Time split of each step on each rank, from its timeline.

Let C be the union of the compute phases of a step (forward, backward until the last gradient, optimiser) without the
intervals in which the compute thread only waited for an operation, and K the union of the operations. Then
`overlapped` = |C ∩ K|, `exposed` = |K| − |C ∩ K|, `other` = step − |C ∪ K|; with `compute` = |C| − |C ∩ K| they add up.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.intervals import Interval, clipped, difference, intersection, length, union
from paceline.records.summary import Split
from paceline.records.timeline import RowKind, Timeline

COMPUTE = (RowKind.FORWARD, RowKind.BACKWARD, RowKind.OPTIMISER)
WARM_UP_STEPS = 5
"""First steps of a run, which no time includes: reducers build buckets, allocators and caches fill."""


PARTS = ("compute", "overlapped", "exposed", "other")
"""Parts of a step; they add up to the step."""


@dataclass(frozen=True)
class StepSplit:
    """Time split of one step."""

    step: int
    split: Split


def split_steps(timeline: Timeline) -> list[StepSplit]:
    """Return the split of every recorded step of a timeline."""
    operations = [TimedSpan.of(row) for row in timeline.operations]
    starts = np.array([span.start_s for span in operations])
    # An operation may continue after its step; the longest one limits how far back to search.
    longest_s = max((span.end_s - span.start_s for span in operations), default=0.0)
    phases = _by_step(timeline.of(RowKind.DATA, *COMPUTE))
    splits = []
    for row in timeline.steps:
        start_s, end_s = float(row["start_s"]), float(row["end_s"])
        first, last = np.searchsorted(starts, [start_s - longest_s, end_s])
        on_wire = operations[first:last]
        splits.append(
            StepSplit(int(row["step"]), split_step(start_s, end_s, phases.get(int(row["step"]), []), on_wire))
        )
    return splits


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A phase or an operation of a timeline."""

    kind: RowKind
    start_s: float
    end_s: float
    wait_start_s: float = math.nan
    """Time from which the compute thread only waited for it; NaN if it never waited."""
    cpu_s: float = math.nan
    """CPU time of the compute thread in the phase; NaN if unknown."""

    @classmethod
    def of(cls, row: Any) -> TimedSpan:
        """Build a span from a row of a timeline."""
        kind, start_s, end_s = RowKind(int(row["kind"])), float(row["start_s"]), float(row["end_s"])
        return cls(kind, start_s, end_s, float(row["wait_start_s"]), float(row["cpu_s"]))


def split_step(start_s: float, end_s: float, phases: Sequence[TimedSpan], operations: Iterable[TimedSpan]) -> Split:
    """Return the split of the step between two times, given its phases and the operations around it."""
    wire = list(operations)
    waits = union((span.wait_start_s, span.end_s) for span in wire if not math.isnan(span.wait_start_s))
    computing = [span for span in phases if span.kind in COMPUTE]
    data = [span for span in phases if span.kind is RowKind.DATA]
    compute = difference(union(_within(computing, start_s, end_s)), waits)
    communication = union(_within(wire, start_s, end_s))
    both = length(intersection(compute, communication))
    either = length(union([*compute, *communication]))
    return Split(
        step_s=end_s - start_s,
        compute_s=length(compute) - both,
        overlapped_s=both,
        exposed_s=length(communication) - both,
        other_s=max(0.0, end_s - start_s - either),  # Rounding errors may be negative.
        data_s=length(difference(union(_within(data, start_s, end_s)), communication)),
        descheduled_s=_descheduled(length(compute), [span.cpu_s for span in computing]),
    )


def mean_split(splits: Sequence[Split], weights: Sequence[float] | None = None) -> Split | None:
    """Return the mean of splits, whose parts still add up; None without splits."""
    if not splits:
        return None

    def mean(part: str) -> float:
        return float(np.average([getattr(split, part) for split in splits], weights=weights))

    return Split(
        **{name: mean(name) for name in ("step_s", *[f"{part}_s" for part in PARTS], "data_s")},
        descheduled_s=None if any(split.descheduled_s is None for split in splits) else mean("descheduled_s"),
    )


def split_of(timeline: Timeline, without: Container[int] = ()) -> Split | None:
    """Return the mean split of a rank's steps after the warm-up, without the steps in `without`.

    If there are no steps after the warm-up, all but the first count; if there is only one, that one. None without
    steps.
    """
    steps = [step for step in split_steps(timeline) if step.step not in without]
    counted = after_warm_up(np.array([step.step for step in steps]))
    return mean_split([step.split for step, counts in zip(steps, counted, strict=True) if counts])


def after_warm_up(steps: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
    """Return a mask of the steps whose times count: after the warm-up; without such, all but the first; else all."""
    for first in (WARM_UP_STEPS, 1):
        counted = steps >= first
        if counted.any():
            return counted
    return np.ones(len(steps), dtype=np.bool_)


def _within(spans: Iterable[TimedSpan], start_s: float, end_s: float) -> list[Interval]:
    return clipped(((span.start_s, span.end_s) for span in spans), start_s, end_s)


def _descheduled(computing_s: float, cpu_s: Sequence[float]) -> float | None:
    """Return compute time minus CPU time; waits use almost no CPU time, so all CPU time belongs to compute."""
    total = sum(cpu_s)
    return None if math.isnan(total) else max(0.0, computing_s - total)


def _by_step(rows: Any) -> dict[int, list[TimedSpan]]:
    found: dict[int, list[TimedSpan]] = {}
    for row in rows:
        found.setdefault(int(row["step"]), []).append(TimedSpan.of(row))
    return found

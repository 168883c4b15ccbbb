"""The time split: where each step's time went on each rank, from its timeline.

Let C be the union of what was computed in a step (forward, backward until the last gradient, the optimiser) without the
moments at which the computing thread only waited for an operation, and K the union of the operations. Then
`overlapped` = |C ∩ K|, `exposed` = |K| − |C ∩ K|, `other` = step − |C ∪ K|; with `compute` = |C| − |C ∩ K| they add up.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.steps.intervals import Interval, clipped, difference, intersection, length, union
from paceline.records.timeline import RowKind, Timeline

COMPUTE = (RowKind.FORWARD, RowKind.BACKWARD, RowKind.OPTIMISER)
WARM_UP_STEPS = 5
"""Steps that do not count, as in the time per iteration: reducers build buckets, allocators and caches fill."""


@dataclass(frozen=True)
class Split:
    """Where the time of a step went, in seconds, on one rank or on average."""

    step_s: float
    compute_s: float
    """Computing, with nothing on the wire."""
    overlapped_s: float
    """Computing and communicating at once."""
    exposed_s: float
    """Communicating, with nothing computed."""
    other_s: float
    """Neither: data, the arithmetic of a strategy, Python."""
    data_s: float
    """Getting the batch, with nothing on the wire; a part of `other_s`."""
    descheduled_s: float | None
    """Wall time less processor time inside what was computed; None where another processor computes."""

    @property
    def communication_s(self) -> float:
        """How long anything was on the wire."""
        return self.overlapped_s + self.exposed_s

    @property
    def computing_s(self) -> float:
        """How long anything was computed."""
        return self.compute_s + self.overlapped_s

    @property
    def overlap(self) -> float | None:
        """The share of communication that was hidden behind computing; undefined when nothing was sent."""
        return self.overlapped_s / self.communication_s if self.communication_s > 0 else None

    def share(self, part: str) -> float:
        """A part's share of the step, by its name, as `exposed`."""
        return float(getattr(self, f"{part}_s")) / self.step_s


PARTS = ("compute", "overlapped", "exposed", "other")
"""They add up to the step."""


@dataclass(frozen=True)
class StepSplit:
    """The split of one step."""

    step: int
    split: Split


def split_steps(timeline: Timeline) -> list[StepSplit]:
    """The split of every step that the timeline keeps."""
    operations = [TimedSpan.of(row) for row in timeline.operations]
    starts = np.array([span.start_s for span in operations])
    # An operation may go on after its step; the longest tells how far back one must look.
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
    """A phase or an operation."""

    kind: RowKind
    start_s: float
    end_s: float
    waited_from_s: float = math.nan
    """Since when the computing thread only waited for it."""
    cpu_s: float = math.nan
    """Processor time that the computing thread got meanwhile."""

    @classmethod
    def of(cls, row: Any) -> TimedSpan:
        """A row of a timeline."""
        kind, start_s, end_s = RowKind(int(row["kind"])), float(row["start_s"]), float(row["end_s"])
        return cls(kind, start_s, end_s, float(row["waited_from_s"]), float(row["cpu_s"]))


def split_step(start_s: float, end_s: float, phases: Sequence[TimedSpan], operations: Iterable[TimedSpan]) -> Split:
    """The split of the step between two moments, given its phases and whatever was on the wire about then."""
    wire = list(operations)
    waits = union((span.waited_from_s, span.end_s) for span in wire if not math.isnan(span.waited_from_s))
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
        other_s=max(0.0, end_s - start_s - either),  # Rounding.
        data_s=length(difference(union(_within(data, start_s, end_s)), communication)),
        descheduled_s=_descheduled(length(compute), [span.cpu_s for span in computing]),
    )


def mean_split(splits: Sequence[Split], weights: Sequence[float] | None = None) -> Split | None:
    """The mean of splits, which still adds up; None of none."""
    if not splits:
        return None

    def mean(part: str) -> float:
        return float(np.average([getattr(split, part) for split in splits], weights=weights))

    return Split(
        **{name: mean(name) for name in ("step_s", *[f"{part}_s" for part in PARTS], "data_s")},
        descheduled_s=None if any(split.descheduled_s is None for split in splits) else mean("descheduled_s"),
    )


def split_of(timeline: Timeline, without: Container[int] = ()) -> Split | None:
    """The mean split of a rank's steps after the warm-up, but for some.

    Where there are no others, of all but the first; of the first where there is only that.
    """
    steps = [step for step in split_steps(timeline) if step.step not in without]
    for first in (WARM_UP_STEPS, 1, 0):
        later = [step.split for step in steps if step.step >= first]
        if later:
            return mean_split(later)
    return None


def _within(spans: Iterable[TimedSpan], start_s: float, end_s: float) -> list[Interval]:
    return clipped(((span.start_s, span.end_s) for span in spans), start_s, end_s)


def _descheduled(computing_s: float, cpu_s: Sequence[float]) -> float | None:
    """Waiting takes next to no processor time, so all that a phase got, it got while it computed."""
    total = sum(cpu_s)
    return None if math.isnan(total) else max(0.0, computing_s - total)


def _by_step(rows: Any) -> dict[int, list[TimedSpan]]:
    found: dict[int, list[TimedSpan]] = {}
    for row in rows:
        found.setdefault(int(row["step"]), []).append(TimedSpan.of(row))
    return found

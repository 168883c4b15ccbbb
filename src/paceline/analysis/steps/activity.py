"""What the computing thread of a rank did when: its phases without their waits, and what it waited for the wire.

The same cuts as in the time split, as intervals instead of sums: what is called waiting here adds up to the exposed
communication there, but for what went on by itself while the batch was fetched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.intervals import clipped, difference, union
from paceline.analysis.steps.split import COMPUTE, TimedSpan
from paceline.records.timeline import RowKind, Timeline

WAITING = "waiting"
DONE = (RowKind.DATA, *COMPUTE)
ACTIVITIES = (*[kind.title for kind in DONE], WAITING)


class Activity(NamedTuple):
    """What a computing thread did, without a break, from one moment to another."""

    what: str
    """The title of a phase, or `WAITING`."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepActivity:
    """One step of one rank."""

    step: int
    start_s: float
    end_s: float
    activities: list[Activity]
    """In order; no two of them overlap, and what is left of the step is other."""
    operations: npt.NDArray[np.void]
    """The rows of all operations that were under way meanwhile."""


def step_activities(timeline: Timeline, only: Collection[int] | None = None) -> Iterator[StepActivity]:
    """The steps that a rank's timeline keeps: all of them, or only some."""
    operations = timeline.operations
    starts, ends = operations["start_s"], operations["end_s"]
    longest_s = float((ends - starts).max()) if len(operations) else 0.0
    phases = timeline.of(*DONE)
    phases = phases[np.argsort(phases["step"], kind="stable")]
    for row in timeline.steps:
        step, start_s, end_s = int(row["step"]), float(row["start_s"]), float(row["end_s"])
        if only is not None and step not in only:
            continue
        first, last = np.searchsorted(starts, [start_s - longest_s, end_s])
        under_way = operations[first:last]
        under_way = under_way[under_way["end_s"] > start_s]
        own = phases[slice(*np.searchsorted(phases["step"], [step, step + 1]))]
        spans, wire = [TimedSpan.of(phase) for phase in own], [TimedSpan.of(operation) for operation in under_way]
        yield StepActivity(step, start_s, end_s, activities_in(start_s, end_s, spans, wire), under_way)


def activities_in(
    start_s: float, end_s: float, phases: Sequence[TimedSpan], operations: Sequence[TimedSpan]
) -> list[Activity]:
    """What was done between two moments, given the phases of the step and what was on the wire about then."""
    waits = union((span.waited_from_s, span.end_s) for span in operations if not math.isnan(span.waited_from_s))
    found, busy = [], []
    for span in phases:
        pieces = difference(union(clipped([(span.start_s, span.end_s)], start_s, end_s)), waits)
        found += [Activity(span.kind.title, *piece) for piece in pieces]
        busy += pieces
    on_wire = union(clipped([(span.start_s, span.end_s) for span in operations], start_s, end_s))
    found += [Activity(WAITING, *piece) for piece in difference(on_wire, union(busy))]
    return sorted(found, key=lambda activity: activity.start_s)

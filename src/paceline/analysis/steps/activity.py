"""Activity of a rank's compute thread as intervals: phases without their waits, and waits for communication.

The division is that of the time split, as intervals instead of sums. Waiting here adds up to exposed communication
there, except for communication in the background while the batch was loaded.
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
PHASES = (RowKind.DATA, *COMPUTE)
ACTIVITIES = (*[kind.title for kind in PHASES], WAITING)


class Activity(NamedTuple):
    """Interval in which a compute thread did one thing without interruption."""

    name: str
    """Title of a phase, or `WAITING`."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepActivity:
    """Activity in one step of one rank."""

    step: int
    start_s: float
    end_s: float
    activities: list[Activity]
    """In order and without overlap; the rest of the step is `other`."""
    operations: npt.NDArray[np.void]
    """Rows of all operations in progress during the step."""


def step_activities(timeline: Timeline, only: Collection[int] | None = None) -> Iterator[StepActivity]:
    """Yield the recorded steps of a rank's timeline: all, or those in `only`."""
    operations = timeline.operations
    starts, ends = operations["start_s"], operations["end_s"]
    longest_s = float((ends - starts).max()) if len(operations) else 0.0
    phases = timeline.of(*PHASES)
    phases = phases[np.argsort(phases["step"], kind="stable")]
    for row in timeline.steps:
        step, start_s, end_s = int(row["step"]), float(row["start_s"]), float(row["end_s"])
        if only is not None and step not in only:
            continue
        first, last = np.searchsorted(starts, [start_s - longest_s, end_s])
        in_progress = operations[first:last]
        in_progress = in_progress[in_progress["end_s"] > start_s]
        step_phases = phases[slice(*np.searchsorted(phases["step"], [step, step + 1]))]
        spans, wire = (
            [TimedSpan.of(phase) for phase in step_phases],
            [TimedSpan.of(operation) for operation in in_progress],
        )
        yield StepActivity(step, start_s, end_s, activities_in(start_s, end_s, spans, wire), in_progress)


def activities_in(
    start_s: float, end_s: float, phases: Sequence[TimedSpan], operations: Sequence[TimedSpan]
) -> list[Activity]:
    """Return the activities between two times, given the phases of the step and the operations around it."""
    waits = union((span.wait_start_s, span.end_s) for span in operations if not math.isnan(span.wait_start_s))
    found, busy = [], []
    for span in phases:
        pieces = difference(union(clipped([(span.start_s, span.end_s)], start_s, end_s)), waits)
        found += [Activity(span.kind.title, *piece) for piece in pieces]
        busy += pieces
    on_wire = union(clipped([(span.start_s, span.end_s) for span in operations], start_s, end_s))
    found += [Activity(WAITING, *piece) for piece in difference(on_wire, union(busy))]
    return sorted(found, key=lambda activity: activity.start_s)

"""Steps shown in the timeline plot: the median and the slowest step, with the activities of each rank."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.activity import StepActivity, step_activities
from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.analysis.steps.timing import profiled_steps, windows_of_attempt
from paceline.records.experiment.design import Candidate
from paceline.records.reader import RunRecord
from paceline.records.timeline import NO_PEER, Purpose, RowKind, Timeline

MOST_RANKS = 8
FINEST, COARSEST = 1 / 1600, 1 / 50
"""Smallest gap between bars that stay separate, as a share of the step: at best, and at worst."""
MEDIAN, SLOWEST = "median step", "slowest step"

COMPUTE_PLACE, COMMUNICATION_PLACE = -0.21, 0.21
THICKNESS = 0.38
"""Height of a line; a rank has a height of 1."""


class TimelineBar(NamedTuple):
    """Activity or operation with a duration, on one line of one rank."""

    what: str
    """Title of a phase or an operation."""
    purpose: str
    """Content of an operation; empty for a phase."""
    place: float
    """Vertical position, downwards; ranks are 1 apart."""
    thickness: float
    start_s: float
    end_s: float
    bytes: int = 0
    peer: str = ""
    merged: int = 1
    """Number of bars drawn as this one."""


@dataclass(frozen=True)
class TimelineStep:
    """One step of one candidate."""

    candidate: Candidate
    which: str
    """Reason why this step is shown: `MEDIAN` or `SLOWEST`."""
    step: int
    length_s: float
    """Time from the earliest start to the latest end over the ranks."""
    longest_s: float
    """Time on the rank that took longest."""
    ranks: list[int]
    bars: list[TimelineBar]


def typical_steps(comparison: Comparison, candidate: Candidate) -> list[TimelineStep]:
    """Return the median and the slowest step of the first repeat with timelines, without warm-up steps."""
    runs = comparison.record_set.runs_of(candidate.name)
    run = next((runs[repeat] for repeat in sorted(runs) if runs[repeat].timelines), None)
    if run is None:
        return []
    ranks = _shown_ranks(sorted(run.timelines))
    chosen = _typical_steps([run.timelines[rank] for rank in ranks], profiled_steps(windows_of_attempt(run)))
    done = {rank: {one.step: one for one in step_activities(run.timelines[rank], chosen)} for rank in ranks}
    return [
        _timeline_step(candidate, which, run, [done[rank][step] for rank in ranks], ranks)
        for step, which in chosen.items()
    ]


def _typical_steps(timelines: Sequence[Timeline], without: Collection[int]) -> dict[int, str]:
    """Return the steps to show, of those that all ranks have; `without` lists profiled steps to leave out."""
    lengths: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for row in timeline.steps:
            lengths[int(row["step"])].append(float(row["end_s"] - row["start_s"]))
    longest = {step: max(own) for step, own in lengths.items() if len(own) == len(timelines)}
    known = [step for step in longest if step >= WARM_UP_STEPS and step not in without]
    counted = {step: longest[step] for step in known} or longest
    if not counted or max(counted.values()) <= 0:
        return {}
    median = statistics.median_low(counted.values())
    typical = min(step for step in counted if counted[step] == median)
    slowest = max(counted, key=lambda step: counted[step])
    return {typical: MEDIAN} if slowest == typical else {typical: MEDIAN, slowest: SLOWEST}


def _shown_ranks(ranks: Sequence[int]) -> list[int]:
    """Return the ranks to draw; of many ranks, evenly spaced ones."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    return [ranks[round(n * (len(ranks) - 1) / (MOST_RANKS - 1))] for n in range(MOST_RANKS)]


def _timeline_step(
    candidate: Candidate, which: str, run: RunRecord, steps: Sequence[StepActivity], ranks: Sequence[int]
) -> TimelineStep:
    """Return a step, with times since its first start, or since each rank's own start if ranks do not step together."""
    first_s = min(step.start_s for step in steps)
    together = run.topology.exchanges and run.lockstep
    origins = [first_s if together else step.start_s for step in steps]
    length_s = max(step.end_s - origin_s for step, origin_s in zip(steps, origins, strict=True))
    bars: list[TimelineBar] = []
    for row, (step, origin_s) in enumerate(zip(steps, origins, strict=True)):
        bars += [*_compute_bars(row, step, origin_s), *_operation_bars(row, step, origin_s)]
    longest_s = max(step.end_s - step.start_s for step in steps)
    return TimelineStep(candidate, which, steps[0].step, length_s, longest_s, list(ranks), bars)


def _compute_bars(row: int, step: StepActivity, origin_s: float) -> Iterator[TimelineBar]:
    for what, start_s, end_s in step.activities:
        yield TimelineBar(what, "", row + COMPUTE_PLACE, THICKNESS, start_s - origin_s, end_s - origin_s)


def _operation_bars(row: int, step: StepActivity, origin_s: float) -> Iterator[TimelineBar]:
    """Yield the operations of a step; those that overlap share the height of the line."""
    lanes = _lanes(step.operations)
    count = max(lanes, default=0) + 1
    thickness = THICKNESS / count
    for operation, lane in zip(step.operations, lanes, strict=True):
        kind, peer = RowKind(int(operation["kind"])), int(operation["peer"])
        role = {RowKind.SEND: "to rank", RowKind.RECV: "from rank"}.get(kind, "root: rank")
        yield TimelineBar(
            what=kind.title,
            purpose=Purpose(int(operation["purpose"])).title,
            place=row + COMMUNICATION_PLACE + (lane - (count - 1) / 2) * thickness,
            thickness=thickness,
            start_s=float(operation["start_s"]) - origin_s,
            end_s=float(operation["end_s"]) - origin_s,
            bytes=int(operation["bytes"]),
            peer="" if peer == NO_PEER else f"{role} {peer}",
        )


def _lanes(operations: Iterable[Any]) -> list[int]:
    """Return, for each operation in the order of their starts, the first lane that is free at its start."""
    free_from_s: list[float] = []
    found = []
    for operation in operations:
        lane = next((n for n, free_s in enumerate(free_from_s) if free_s <= operation["start_s"]), len(free_from_s))
        free_from_s[lane:] = [float(operation["end_s"]), *free_from_s[lane + 1 :]]
        found.append(lane)
    return found


def thinned(timeline_step: TimelineStep, most: int) -> TimelineStep:
    """Return the step with at most `most` bars, if merging bars that are very close reaches that."""
    bars, finest = timeline_step.bars, FINEST
    while len(bars) > most and finest < COARSEST:
        bars = list(_merged(timeline_step.bars, finest * timeline_step.length_s))
        finest *= 1.5
    return replace(timeline_step, bars=bars)


def _merged(bars: Sequence[TimelineBar], finest_s: float) -> Iterator[TimelineBar]:
    """Yield the bars, with those of one kind that are closer than `finest_s` merged."""
    lines: dict[tuple[Any, ...], list[TimelineBar]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        line = lines[bar.what, bar.purpose, bar.place]
        last = line[-1] if line else None
        if last is None or bar.start_s - last.end_s > finest_s or bar.end_s - last.start_s > 8 * finest_s:
            line.append(bar)
            continue
        peer = last.peer if last.peer == bar.peer else ""
        end_s, merged = max(last.end_s, bar.end_s), last.merged + bar.merged
        line[-1] = last._replace(end_s=end_s, bytes=last.bytes + bar.bytes, peer=peer, merged=merged)
    for line in lines.values():
        yield from line

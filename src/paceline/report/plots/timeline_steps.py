"""The steps that a timeline shows: which ones are typical, and what lasted from when to when on each rank."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.activity import StepActivity, step_activities
from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.analysis.steps.timing import profiled_steps, windows_of
from paceline.records.experiment import Candidate
from paceline.records.reader import RunRecord
from paceline.records.timeline import NO_PEER, Purpose, RowKind, Timeline

MOST_RANKS = 8
FINEST, COARSEST = 1 / 1600, 1 / 50
"""The share of a step that can be told apart, at best and at worst."""
MEDIAN, SLOWEST = "median step", "slowest step"

COMPUTE_PLACE, WIRE_PLACE = -0.21, 0.21
THICKNESS = 0.38
"""Of a line; a rank has a height of 1."""


class TimelineBar(NamedTuple):
    """Something that lasted, on one line of one rank."""

    what: str
    """The title of a phase or of an operation."""
    purpose: str
    """What an operation carries."""
    place: float
    """How far down; ranks are 1 apart."""
    thickness: float
    start_s: float
    end_s: float
    bytes: int = 0
    peer: str = ""
    several: int = 1
    """How many stand behind it."""


@dataclass(frozen=True)
class TimelineStep:
    """One step of one candidate."""

    candidate: Candidate
    which: str
    """Why this one is shown."""
    step: int
    length_s: float
    """From its start on the first rank until it has ended on the last."""
    longest_s: float
    """On the rank that took longest."""
    ranks: list[int]
    bars: list[TimelineBar]


def typical_steps(comparison: Comparison, candidate: Candidate) -> list[TimelineStep]:
    """The median step of the first repeat and the slowest one, warm-up apart."""
    runs = comparison.record_set.runs_of(candidate.name)
    run = next((runs[repeat] for repeat in sorted(runs) if runs[repeat].timelines), None)
    if run is None:
        return []
    ranks = _shown_ranks(sorted(run.timelines))
    chosen = _typical_steps([run.timelines[rank] for rank in ranks], profiled_steps(windows_of(run)))
    done = {rank: {one.step: one for one in step_activities(run.timelines[rank], chosen)} for rank in ranks}
    return [
        _scene(candidate, which, run, [done[rank][step] for rank in ranks], ranks) for step, which in chosen.items()
    ]


def _typical_steps(timelines: Sequence[Timeline], without: Collection[int]) -> dict[int, str]:
    """The steps to show, with what they are, of those that all ranks have; `without` those that a profiler slowed."""
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
    """Of many ranks, some from the first to the last."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    return [ranks[round(n * (len(ranks) - 1) / (MOST_RANKS - 1))] for n in range(MOST_RANKS)]


def _scene(
    candidate: Candidate, which: str, run: RunRecord, steps: Sequence[StepActivity], ranks: Sequence[int]
) -> TimelineStep:
    """Times from the start of the step on the first rank; where ranks do not wait for each other, on each its own."""
    first_s = min(step.start_s for step in steps)
    together = run.topology.get("exchanges", True) and run.lockstep
    origins = [first_s if together else step.start_s for step in steps]
    length_s = max(step.end_s - origin_s for step, origin_s in zip(steps, origins, strict=True))
    bars: list[TimelineBar] = []
    for row, (step, origin_s) in enumerate(zip(steps, origins, strict=True)):
        bars += [*_computed(row, step, origin_s), *_wired(row, step, origin_s)]
    longest_s = max(step.end_s - step.start_s for step in steps)
    return TimelineStep(candidate, which, steps[0].step, length_s, longest_s, list(ranks), bars)


def _computed(row: int, step: StepActivity, origin_s: float) -> Iterator[TimelineBar]:
    for what, start_s, end_s in step.activities:
        yield TimelineBar(what, "", row + COMPUTE_PLACE, THICKNESS, start_s - origin_s, end_s - origin_s)


def _wired(row: int, step: StepActivity, origin_s: float) -> Iterator[TimelineBar]:
    """Operations that overlap share the height of the line."""
    lanes = _lanes(step.operations)
    count = max(lanes, default=0) + 1
    thickness = THICKNESS / count
    for operation, lane in zip(step.operations, lanes, strict=True):
        kind, peer = RowKind(int(operation["kind"])), int(operation["peer"])
        role = {RowKind.SEND: "to rank", RowKind.RECV: "from rank"}.get(kind, "root: rank")
        yield TimelineBar(
            what=kind.title,
            purpose=Purpose(int(operation["purpose"])).title,
            place=row + WIRE_PLACE + (lane - (count - 1) / 2) * thickness,
            thickness=thickness,
            start_s=float(operation["start_s"]) - origin_s,
            end_s=float(operation["end_s"]) - origin_s,
            bytes=int(operation["bytes"]),
            peer="" if peer == NO_PEER else f"{role} {peer}",
        )


def _lanes(operations: Iterable[Any]) -> list[int]:
    """For each operation, in the order of their start, the first lane that is free by then."""
    free_from_s: list[float] = []
    found = []
    for operation in operations:
        lane = next((n for n, free_s in enumerate(free_from_s) if free_s <= operation["start_s"]), len(free_from_s))
        free_from_s[lane:] = [float(operation["end_s"]), *free_from_s[lane + 1 :]]
        found.append(lane)
    return found


def thinned(timeline_step: TimelineStep, most: int) -> TimelineStep:
    """The same with no more bars than that, if merging those that can hardly be told apart gets there."""
    bars, finest = timeline_step.bars, FINEST
    while len(bars) > most and finest < COARSEST:
        bars = list(_merged(timeline_step.bars, finest * timeline_step.length_s))
        finest *= 1.5
    return replace(timeline_step, bars=bars)


def _merged(bars: Sequence[TimelineBar], finest_s: float) -> Iterator[TimelineBar]:
    """Bars of one kind on one line that lie closer than can be told apart, as one."""
    lines: dict[tuple[Any, ...], list[TimelineBar]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        line = lines[bar.what, bar.purpose, bar.place]
        last = line[-1] if line else None
        if last is None or bar.start_s - last.end_s > finest_s or bar.end_s - last.start_s > 8 * finest_s:
            line.append(bar)
            continue
        peer = last.peer if last.peer == bar.peer else ""
        end_s, count = max(last.end_s, bar.end_s), last.several + bar.several
        line[-1] = last._replace(end_s=end_s, bytes=last.bytes + bar.bytes, peer=peer, several=count)
    for line in lines.values():
        yield from line

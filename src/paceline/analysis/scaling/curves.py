"""How strategies scale: every figure of a scaling experiment, from its record alone.

Strong scaling keeps the global batch, weak scaling the batch per rank. Either way the speed-up is the samples per
second ÷ the baseline's, paired by repeat, and the efficiency E is that ÷ the N ranks: T₁/(N·T_N) at a fixed global
batch, T₁/T_N at a fixed batch per rank. The baselines are `single` and the strategy itself on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from paceline.analysis.caveats import caveats
from paceline.analysis.comparison import CandidateRow, Comparison, compare, cost_per_sample
from paceline.analysis.record_set import RecordSet
from paceline.analysis.scaling.machines import SAME_PROCESSOR, cores_in_words, crowding, processor
from paceline.analysis.scaling.notes import notes
from paceline.analysis.statistics import Estimate, median_time, of_times, paired_ratio
from paceline.analysis.steps.timing import step_time, windows_of
from paceline.errors import RecordError
from paceline.records import RunRecord
from paceline.records.experiment import Candidate
from paceline.records.writer import strict

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")
KIND = "scale"
"""What the record of such an experiment says it is."""


@dataclass(frozen=True)
class ScalingGain:
    """What a point gains over a baseline."""

    over: str
    """The baseline's name."""
    speed_up: Estimate
    """Samples per second ÷ the baseline's, paired by repeat; at equal batches T₁/T_N."""
    efficiency: Estimate | None
    """That ÷ the number of ranks; None where a rank did not have what the baseline had."""
    unclaimed: str = ""
    """Why there is none, in words."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        efficiency = None if self.efficiency is None else self.efficiency.to_dict()
        found = {"over": self.over, "speed_up": self.speed_up.to_dict(), "efficiency": efficiency}
        return found | {"unclaimed": self.unclaimed or None}


@dataclass(frozen=True)
class ScalingPoint:
    """A strategy on some ranks, in one kind of scaling. A figure is None where nothing was measured."""

    row: CandidateRow
    mode: Mode
    ranks: int
    hosts: int
    ranks_per_host: int
    batch: int
    """The global batch."""
    batch_per_rank: float
    epoch_s: Estimate | None
    """Time per iteration × the steps of an epoch at this batch."""
    over_single: ScalingGain | None
    over_itself: ScalingGain | None
    """None too for what is crowded."""
    crowded: str
    """Why no speed-up is claimed from it, in words: its ranks have not got a core each."""

    @property
    def candidate(self) -> Candidate:
        """What was measured."""
        return self.row.candidate

    @property
    def strategy(self) -> str:
        """As it was written."""
        return self.row.candidate.strategy

    @property
    def counts(self) -> bool:
        """Whether anything can be claimed from it."""
        return self.row.is_measured and not self.crowded

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        own = {name: getattr(self, name) for name in ("mode", "ranks", "hosts", "ranks_per_host")}
        own |= {"batch": self.batch, "batch_per_rank": self.batch_per_rank, "crowded": self.crowded or None}
        gains = {name: gain and gain.to_dict() for name, gain in self.gains.items()}
        figures = {"epoch_s": self.epoch_s and self.epoch_s.to_dict(), **gains}
        found: dict[str, Any] = strict(self.row.to_dict() | own | figures)
        return found

    def longer(self, gain: ScalingGain) -> Estimate:
        """A step's time ÷ that of a baseline, in weak scaling: there are as many times more samples in it as ranks."""
        return gain.speed_up.inverse().scaled(self.ranks)

    @property
    def gains(self) -> dict[str, ScalingGain | None]:
        """Over both baselines, by name."""
        return {"over_single": self.over_single, "over_itself": self.over_itself}


@dataclass(frozen=True)
class ScalingCurve:
    """A strategy over its ranks, fewest first."""

    strategy: str
    mode: Mode
    role: str
    points: list[ScalingPoint]
    ranks_per_host: int | None = None
    """Told where the same ranks were put on hosts in several ways: this curve has the points of one way."""

    @property
    def last(self) -> ScalingPoint:
        """On the most ranks of those that count; where none does, of all."""
        return ([point for point in self.points if point.counts] or self.points)[-1]


@dataclass(frozen=True)
class ScalingPeak:
    """The ranks on which a strategy is fastest, and what ranks before or beyond them are worth."""

    curve: ScalingCurve
    best: ScalingPoint
    before: Estimate | None
    """The time per sample on the next fewer ranks ÷ the best's."""
    before_ranks: int | None
    beyond: Estimate | None
    """The same on the next more ranks; None where there are none that count."""
    beyond_ranks: int | None


@dataclass(frozen=True)
class HostSpread:
    """The same ranks on fewer hosts against on more."""

    fewer: ScalingPoint
    more: ScalingPoint
    ratio: Estimate
    """The time per sample on fewer hosts ÷ that on more."""


@dataclass(frozen=True)
class Scaling:
    """The whole answer."""

    comparison: Comparison
    """The same runs side by side: their rows, proofs and failures."""
    curves: list[ScalingCurve]
    """By mode, then in the order in which strategies were named; `single` is a curve of one point."""
    warnings: list[str]
    design: Mapping[str, Any]

    @property
    def record_set(self) -> RecordSet:
        """The records."""
        return self.comparison.record_set

    @property
    def modes(self) -> list[Mode]:
        """The kinds of scaling that were measured."""
        return [mode for mode in MODES if self.in_mode(mode)]

    def in_mode(self, mode: Mode) -> list[ScalingCurve]:
        """The curves of one kind of scaling."""
        return [curve for curve in self.curves if curve.mode == mode]

    def points(self, mode: Mode) -> list[ScalingPoint]:
        """The points of one kind of scaling, each once: by strategy, then by ranks, then by hosts."""
        found = {p.candidate.name: p for curve in self.in_mode(mode) for p in curve.points}
        order = list(dict.fromkeys(p.strategy for p in found.values()))
        return sorted(found.values(), key=lambda p: (order.index(p.strategy), p.ranks, -p.hosts))

    def ratio(self, one: ScalingPoint, other: ScalingPoint) -> Estimate | None:
        """The time per sample of one point ÷ another's, paired by repeat."""
        return paired_ratio(self._costs(one), self._costs(other))

    def _costs(self, point: ScalingPoint) -> dict[tuple[int, int], float]:
        return cost_per_sample(self.record_set, point.candidate.name)

    def candidates(self, mode: Mode) -> list[ScalingCurve]:
        """The curves of what shares the work."""
        return [curve for curve in self.in_mode(mode) if curve.role == "candidate"]

    def best(self, mode: Mode) -> ScalingPoint | None:
        """The point of a candidate that trains most samples per second, of those that count and share the work."""
        counted = [point for curve in self.candidates(mode) for point in curve.points if point.counts]
        sharing = [point for point in counted if point.ranks > 1]
        return min(sharing or counted, key=lambda point: median_time(self._costs(point).values()), default=None)

    def peak(self, curve: ScalingCurve) -> ScalingPeak | None:
        """Where a curve is fastest; None where it has not two points that count."""
        counted = [point for point in curve.points if point.counts]
        if len(counted) < 2:
            return None
        best = min(counted, key=lambda point: median_time(self._costs(point).values()))
        place = counted.index(best)
        fewer = counted[place - 1] if place else None
        more = counted[place + 1] if place + 1 < len(counted) else None
        return ScalingPeak(
            curve=curve,
            best=best,
            before=None if fewer is None else self.ratio(fewer, best),
            before_ranks=None if fewer is None else fewer.ranks,
            beyond=None if more is None else self.ratio(more, best),
            beyond_ranks=None if more is None else more.ranks,
        )

    def spreads(self, mode: Mode) -> list[HostSpread]:
        """Every strategy's ranks on fewer hosts against the same number on more, where both were measured."""
        ordered = sorted(
            (point for point in self.points(mode) if point.counts), key=lambda p: (p.strategy, p.ranks, p.hosts)
        )
        alike = [pair for pair in pairwise(ordered) if pair[0].strategy == pair[1].strategy]
        found = [(one, other, self.ratio(one, other)) for one, other in alike if one.ranks == other.ranks]
        return [HostSpread(one, other, ratio) for one, other, ratio in found if ratio is not None]

    def alone(self, mode: Mode) -> list[tuple[ScalingPoint, Estimate]]:
        """Every candidate on one rank, with its time ÷ that of `single`, where both had the same to compute with."""
        ones = [curve.points[0] for curve in self.candidates(mode) if curve.points[0].ranks == 1]
        gains = [(point, point.over_single) for point in ones if point.over_single is not None]
        return [(point, gain.speed_up.inverse()) for point, gain in gains if gain.efficiency is not None]


def scaling(record_set: RecordSet) -> Scaling:
    """Everything that the record of a scaling experiment says."""
    if len(record_set.designs) != 1 or any(candidate.point is None for candidate in record_set.candidates):
        raise RecordError("this is not one scaling experiment.", hint="name the folder of one `paceline scale`")
    measured = _MeasuredPoints(compare(record_set))
    curves = [curve for mode in MODES for curve in _curves(measured.points(mode))]
    uneven = {row.candidate.name: row.uneven for row in measured.comparison.rows}
    warnings = [*notes(curves, measured.design), *caveats(record_set, uneven, crowding=False)]
    return Scaling(measured.comparison, curves, warnings, measured.design)


class _MeasuredPoints:
    """What was measured, by candidate, and points made of it."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.record_set = comparison.record_set
        self.design = comparison.record_set.designs[0]
        self.rows = {row.candidate.name: row for row in comparison.rows}
        self.costs = {name: cost_per_sample(self.record_set, name) for name in self.rows}

    def points(self, mode: Mode) -> list[ScalingPoint]:
        """Every point of one kind of scaling, in the order of the record."""
        own = [candidate for candidate in self.record_set.candidates if _point_of(candidate)["mode"] in (mode, "both")]
        single = [candidate for candidate in own if candidate.role == "baseline"][:1]
        alone = {c.strategy: c for c in own if _point_of(c)["ranks"] == 1}
        return [self._point(mode, c, [*single, *([alone[c.strategy]] if c.strategy in alone else [])]) for c in own]

    def _point(self, mode: Mode, candidate: Candidate, baselines: Sequence[Candidate]) -> ScalingPoint:
        runs = [entry.run for entry in self.record_set.entries_of(candidate.name)]
        crowded = crowding(runs[0].topology, self.design) if runs else ""
        others = [] if crowded or candidate.role == "baseline" else baselines
        gains = {base.strategy: gain for base in others if (gain := self._gain(candidate, base)) is not None}
        single = next((base.strategy for base in others if base.role == "baseline"), "")
        shape = {key: _point_of(candidate)[key] for key in ("ranks", "hosts", "ranks_per_host")}
        batch = {key: _point_of(candidate)[key] for key in ("batch", "batch_per_rank")}
        return ScalingPoint(
            row=self.rows[candidate.name],
            mode=mode,
            **shape,
            **batch,
            epoch_s=_epoch_s(runs),
            over_single=gains.get(single),
            over_itself=gains.get(candidate.strategy),
            crowded=crowded,
        )

    def _gain(self, candidate: Candidate, base: Candidate) -> ScalingGain | None:
        """What it gains over one baseline; None where one of them was not measured, or failed."""
        if not (self.rows[candidate.name].is_measured and self.rows[base.name].is_measured):
            return None
        speed_up = paired_ratio(self.costs[base.name], self.costs[candidate.name])
        if speed_up is None:
            return None
        own, given = (processor(self._topology(one), self.design) for one in (candidate, base))
        if abs(own - given) > SAME_PROCESSOR * given:
            who = base.strategy if base.role == "baseline" else "one rank alone"
            return ScalingGain(
                base.name, speed_up, None, f"{who} had {cores_in_words(given)}, a rank has {cores_in_words(own)}"
            )
        return ScalingGain(base.name, speed_up, speed_up.scaled(1 / _point_of(candidate)["ranks"]))

    def _topology(self, candidate: Candidate) -> Mapping[str, Any]:
        return self.record_set.entries_of(candidate.name)[0].run.topology


def _point_of(candidate: Candidate) -> dict[str, Any]:
    assert candidate.point is not None
    return candidate.point


def _epoch_s(runs: Sequence[RunRecord]) -> Estimate | None:
    times = []
    for run in runs:
        step_s, steps = step_time(windows_of(run)), _steps_per_epoch(run)
        if step_s and steps:
            times.append(step_s * steps)
    return of_times(times)


def _steps_per_epoch(run: RunRecord) -> int | None:
    starts = run.events_of("start")
    steps = starts[0].get("steps_per_epoch") if starts else None
    return steps if isinstance(steps, int) and steps > 0 else None


def _curves(points: Sequence[ScalingPoint]) -> Iterator[ScalingCurve]:
    """A curve per strategy; one per number of ranks on a host where there are several ways to place the same ranks."""
    for strategy in dict.fromkeys(point.strategy for point in points):
        own = sorted((point for point in points if point.strategy == strategy), key=lambda p: (p.ranks, p.hosts))
        ways = len({point.ranks for point in own}) < len(own)
        for number in sorted({point.ranks_per_host for point in own}) if ways else [None]:
            kept = [point for point in own if number in (None, point.ranks_per_host)]
            yield ScalingCurve(strategy, own[0].mode, own[0].candidate.role, kept, number)

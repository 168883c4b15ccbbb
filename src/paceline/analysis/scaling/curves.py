"""Scaling curves: every value of a scaling experiment, from its record alone.

Strong scaling keeps the global batch constant, weak scaling the batch per rank. In both modes the speed-up is samples
per second ÷ those of the baseline, paired by repeat, and the efficiency E is the speed-up ÷ N ranks: T₁/(N·T_N) at a
fixed global batch, T₁/T_N at a fixed batch per rank. The baselines are `single` and the strategy itself on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from paceline.analysis.caveats import caveats
from paceline.analysis.comparison import CandidateRow, Comparison, compare
from paceline.analysis.record_set import RecordSet
from paceline.analysis.scaling.machines import oversubscription, unequal_cores
from paceline.analysis.scaling.notes import scaling_notes
from paceline.analysis.statistics import Estimate, median_time
from paceline.analysis.superlinear import superlinear_gains, superlinear_notes
from paceline.errors import RecordError
from paceline.records import RunRecord, Topology
from paceline.records.events import StartEvent
from paceline.records.experiment.design import Candidate, CandidatePoint, ScaleDesign

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


@dataclass(frozen=True)
class ScalingGain:
    """Speed-up and efficiency of a point relative to a baseline."""

    baseline: str
    """Name of the baseline."""
    speed_up: Estimate
    """Samples per second ÷ those of the baseline, paired by repeat; at equal batches T₁/T_N."""
    efficiency: Estimate | None
    """Speed-up ÷ number of ranks; None if a rank had other cores than the baseline."""
    no_efficiency_reason: str = ""
    """Reason why there is no efficiency; empty if there is one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the gain as JSON values."""
        efficiency = None if self.efficiency is None else self.efficiency.to_dict()
        found = {"baseline": self.baseline, "speed_up": self.speed_up.to_dict(), "efficiency": efficiency}
        return found | {"no_efficiency_reason": self.no_efficiency_reason or None}


@dataclass(frozen=True)
class ScalingPoint:
    """A strategy on one number of ranks in one scaling mode. A value is None if nothing was measured."""

    row: CandidateRow
    mode: Mode
    ranks: int
    hosts: int
    ranks_per_host: int
    batch: int
    """The global batch."""
    batch_per_rank: float
    epoch_s: Estimate | None
    """Step time × steps per epoch at this batch."""
    over_single: ScalingGain | None
    over_one_rank: ScalingGain | None
    """Gain over the same strategy on one rank. Both gains are None for an oversubscribed point."""
    oversubscribed: str
    """Reason why no speed-up is reported: ranks share cores or GPUs. Empty if they do not."""

    @property
    def candidate(self) -> Candidate:
        """Candidate that was measured."""
        return self.row.candidate

    @property
    def strategy(self) -> str:
        """Strategy as the user wrote it."""
        return self.row.candidate.strategy

    @property
    def is_comparable(self) -> bool:
        """Whether it was measured, and its ranks did not share cores or GPUs."""
        return self.row.is_measured and not self.oversubscribed

    def step_time_ratio(self, gain: ScalingGain) -> Estimate:
        """Return the step time ÷ that of a baseline in weak scaling, where a step has `ranks` times as many samples."""
        return gain.speed_up.inverse().scaled(self.ranks)

    @property
    def gains(self) -> dict[str, ScalingGain | None]:
        """Gains over both baselines, by name."""
        return {"over_single": self.over_single, "over_one_rank": self.over_one_rank}


@dataclass(frozen=True)
class ScalingCurve:
    """Points of a strategy, fewest ranks first."""

    strategy: str
    mode: Mode
    role: str
    points: list[ScalingPoint]
    ranks_per_host: int | None = None
    """Set if the same number of ranks was placed on hosts in several ways: this curve has one placement."""

    @property
    def last(self) -> ScalingPoint:
        """Comparable point with the most ranks; if no point is comparable, the last."""
        return ([point for point in self.points if point.is_comparable] or self.points)[-1]


@dataclass(frozen=True)
class ScalingPeak:
    """Number of ranks on which a strategy is fastest, compared with the next fewer and next more ranks."""

    curve: ScalingCurve
    best: ScalingPoint
    before: Estimate | None
    """Time per sample on the next fewer ranks ÷ that of the best point; None if there are no fewer."""
    before_ranks: int | None
    beyond: Estimate | None
    """The same for the next more ranks; None if there is no comparable point."""
    beyond_ranks: int | None


@dataclass(frozen=True)
class HostCountComparison:
    """The same number of ranks on fewer and on more hosts."""

    fewer: ScalingPoint
    more: ScalingPoint
    ratio: Estimate
    """Time per sample on fewer hosts ÷ that on more hosts."""


@dataclass(frozen=True)
class Scaling:
    """Result of a scaling experiment."""

    comparison: Comparison
    """Comparison of the same runs: rows, parity proofs, failures."""
    curves: list[ScalingCurve]
    """Ordered by mode, then by strategy as the user listed them; `single` is a curve of one point."""
    warnings: list[str]
    design: ScaleDesign
    in_doubt: frozenset[tuple[str, str]]
    """Candidates with a baseline over which they have a speed-up that ranks cannot have, beside other programs."""

    @property
    def record_set(self) -> RecordSet:
        """Records of the experiment."""
        return self.comparison.record_set

    def is_in_doubt(self, point: ScalingPoint, gain: ScalingGain) -> bool:
        """Return whether a gain is more than the ranks of the point and caches explain."""
        return (point.candidate.name, gain.baseline) in self.in_doubt

    @property
    def modes(self) -> list[Mode]:
        """Scaling modes that were measured."""
        return [mode for mode in MODES if self.in_mode(mode)]

    def in_mode(self, mode: Mode) -> list[ScalingCurve]:
        """Return the curves of one mode."""
        return [curve for curve in self.curves if curve.mode == mode]

    def points(self, mode: Mode) -> list[ScalingPoint]:
        """Return the points of one mode without duplicates, ordered by strategy, ranks and hosts."""
        found = {p.candidate.name: p for curve in self.in_mode(mode) for p in curve.points}
        order = list(dict.fromkeys(p.strategy for p in found.values()))
        return sorted(found.values(), key=lambda p: (order.index(p.strategy), p.ranks, -p.hosts))

    def ratio(self, one: ScalingPoint, other: ScalingPoint) -> Estimate | None:
        """Return the time per sample of one point ÷ that of another, paired by repeat."""
        return self.comparison.costs.ratio(one.candidate.name, other.candidate.name)

    def _median_cost(self, point: ScalingPoint) -> float:
        return median_time(self.comparison.costs[point.candidate.name].values())

    def candidates(self, mode: Mode) -> list[ScalingCurve]:
        """Return the curves with role candidate."""
        return [curve for curve in self.in_mode(mode) if curve.role == "candidate"]

    def best(self, mode: Mode) -> ScalingPoint | None:
        """Return the comparable candidate point with the most samples per second, on several ranks if there is one.

        Strategies that do not compute the same as one process count only if there is no other.
        """
        comparable = [point for curve in self.candidates(mode) for point in curve.points if point.is_comparable]
        counted = [point for point in comparable if point.row.exclusion is None] or comparable
        sharing = [point for point in counted if point.ranks > 1]
        return min(sharing or counted, key=self._median_cost, default=None)

    def peak(self, curve: ScalingCurve) -> ScalingPeak | None:
        """Return the fastest point of a curve; None if it has fewer than two comparable points."""
        counted = [point for point in curve.points if point.is_comparable]
        if len(counted) < 2:
            return None
        best = min(counted, key=self._median_cost)
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

    def host_count_comparisons(self, mode: Mode) -> list[HostCountComparison]:
        """Compare, for every strategy, the same number of ranks on fewer and on more hosts."""
        ordered = sorted(
            (point for point in self.points(mode) if point.is_comparable), key=lambda p: (p.strategy, p.ranks, p.hosts)
        )
        same_strategy = [pair for pair in pairwise(ordered) if pair[0].strategy == pair[1].strategy]
        found = [(one, other, self.ratio(one, other)) for one, other in same_strategy if one.ranks == other.ranks]
        return [HostCountComparison(one, other, ratio) for one, other, ratio in found if ratio is not None]

    def single_rank_overheads(self, mode: Mode) -> list[tuple[ScalingPoint, Estimate]]:
        """Return every candidate on one rank with its time ÷ that of `single`, if both had the same cores."""
        ones = [curve.points[0] for curve in self.candidates(mode) if curve.points[0].ranks == 1]
        gains = [(point, point.over_single) for point in ones if point.over_single is not None]
        return [(point, gain.speed_up.inverse()) for point, gain in gains if gain.efficiency is not None]


def scaling(record_set: RecordSet) -> Scaling:
    """Return the results of a scaling experiment; raise `RecordError` if the records are not exactly one."""
    design = record_set.designs[0] if len(record_set.designs) == 1 else None
    if not isinstance(design, ScaleDesign) or any(candidate.point is None for candidate in record_set.candidates):
        raise RecordError(
            "these records are not one scaling experiment.", hint="name the folder of one `paceline scale`"
        )
    measured = _MeasuredPoints(compare(record_set), design)
    curves = [curve for mode in MODES for curve in _curves(measured.points(mode))]
    spreads = {row.candidate.name: row.rank_step_spread for row in measured.comparison.rows}
    gains = [(p, gain) for c in curves for p in c.points for gain in (p.over_single, p.over_one_rank) if gain]
    superlinear = [
        gain
        for gain in superlinear_gains(
            record_set, measured.comparison.costs, [(p.candidate.name, p.ranks, gain.baseline) for p, gain in gains]
        )
        if gain.is_in_doubt
    ]
    warnings = [
        *scaling_notes(curves, measured.design, {gain.candidate for gain in superlinear}),
        *superlinear_notes(superlinear, record_set),
        *measured.comparison.costs.contradictions((point.candidate.name, gain.baseline) for point, gain in gains),
        *caveats(record_set, spreads, shared_cores=False),
    ]
    in_doubt = frozenset((gain.candidate, gain.baseline) for gain in superlinear)
    return Scaling(measured.comparison, curves, warnings, measured.design, in_doubt)


class _MeasuredPoints:
    """Measurements by candidate, from which points are built."""

    def __init__(self, comparison: Comparison, design: ScaleDesign) -> None:
        self.comparison = comparison
        self.record_set = comparison.record_set
        self.design = design
        self.rows = {row.candidate.name: row for row in comparison.rows}

    def points(self, mode: Mode) -> list[ScalingPoint]:
        """Return every point of one mode, in the order of the record."""
        in_mode = [c for c in self.record_set.candidates if _point_of(c).mode in (mode, "both")]
        single = [candidate for candidate in in_mode if candidate.role == "baseline"][:1]
        one_rank = {c.strategy: c for c in in_mode if _point_of(c).ranks == 1}
        return [
            self._point(mode, c, [*single, *([one_rank[c.strategy]] if c.strategy in one_rank else [])])
            for c in in_mode
        ]

    def _point(self, mode: Mode, candidate: Candidate, baselines: Sequence[Candidate]) -> ScalingPoint:
        runs = [recorded.run for recorded in self.record_set.recorded_runs_of(candidate.name)]
        oversubscribed = oversubscription(runs[0].topology, self.design) if runs else ""
        others = [] if oversubscribed or candidate.role == "baseline" else baselines
        gains = {base.strategy: gain for base in others if (gain := self._gain(candidate, base)) is not None}
        single = next((base.strategy for base in others if base.role == "baseline"), "")
        point, row = _point_of(candidate), self.rows[candidate.name]
        step_s, steps = row.step_s, next(filter(None, map(_steps_per_epoch, runs)), None)
        return ScalingPoint(
            row=row,
            mode=mode,
            ranks=point.ranks,
            hosts=point.hosts,
            ranks_per_host=point.ranks_per_host,
            batch=point.batch,
            batch_per_rank=point.batch_per_rank,
            epoch_s=None if step_s is None or not steps else step_s.scaled(steps),
            over_single=gains.get(single),
            over_one_rank=gains.get(candidate.strategy),
            oversubscribed=oversubscribed,
        )

    def _gain(self, candidate: Candidate, base: Candidate) -> ScalingGain | None:
        """Return the gain over one baseline; None if either was not measured or failed."""
        if not (self.rows[candidate.name].is_measured and self.rows[base.name].is_measured):
            return None
        speed_up = self.comparison.costs.ratio(base.name, candidate.name)
        if speed_up is None:
            return None
        reason = unequal_cores(base, self._topology(base), self._topology(candidate), self.design)
        if reason:
            return ScalingGain(base.name, speed_up, None, reason)
        return ScalingGain(base.name, speed_up, speed_up.scaled(1 / _point_of(candidate).ranks))

    def _topology(self, candidate: Candidate) -> Topology:
        return self.record_set.recorded_runs_of(candidate.name)[0].run.topology


def _point_of(candidate: Candidate) -> CandidatePoint:
    assert candidate.point is not None
    return candidate.point


def _steps_per_epoch(run: RunRecord) -> int | None:
    starts = run.events_of(StartEvent)
    return (starts[0].steps_per_epoch or None) if starts else None


def _curves(points: Sequence[ScalingPoint]) -> Iterator[ScalingCurve]:
    """Yield one curve per strategy; one per ranks-per-host if the same ranks were placed in several ways."""
    for strategy in dict.fromkeys(point.strategy for point in points):
        of_strategy = sorted((p for p in points if p.strategy == strategy), key=lambda p: (p.ranks, p.hosts))
        several_placements = len({point.ranks for point in of_strategy}) < len(of_strategy)
        first = of_strategy[0]
        for number in sorted({point.ranks_per_host for point in of_strategy}) if several_placements else [None]:
            kept = [point for point in of_strategy if number in (None, point.ranks_per_host)]
            yield ScalingCurve(strategy, first.mode, first.candidate.role, kept, number)

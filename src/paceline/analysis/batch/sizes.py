"""Batch-size efficiency: every value of an experiment over batch sizes, from its record alone.

A point is a strategy on some ranks at one batch size. Its speed-up is samples per second ÷ those on the fewest ranks at
the same size, paired by repeat. A curve has the points of one strategy on the same ranks over all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.analysis.batch.epochs import EpochTime, epoch_time
from paceline.analysis.batch.peaks import peak_flop_per_s
from paceline.analysis.batch.progress import Progress, progress_at, training_time
from paceline.analysis.caveats import caveats
from paceline.analysis.comparison import (
    Alternative,
    CandidateRow,
    Comparison,
    compare,
    is_tested_in_training,
)
from paceline.analysis.curves import highest_rate, result_at, validation_curve
from paceline.analysis.decision import ERROR_RATE
from paceline.analysis.learning import Repeat, accuracy_gain, converging_runs
from paceline.analysis.other_load import is_notable
from paceline.analysis.record_set import RecordSet
from paceline.analysis.scaling.machines import hosts_of, machines_of, oversubscription, placement_notes, unequal_cores
from paceline.analysis.statistics import (
    Estimate,
    estimate_levels,
    estimate_shares,
    estimate_times,
)
from paceline.errors import OutOfMemory, RecordError
from paceline.formatting import TENTHS, format_cores, join_names, short, whole
from paceline.records import RunRecord
from paceline.records.events import FailureEvent, events_of
from paceline.records.experiment import BatchDesign, Candidate, CandidatePoint

WITHIN = 0.05
"""Share of the highest samples per second that a smaller batch may lose and still count as large enough."""
REACHED = 0.9
"""Share of the peak learning rate below which a run counts as too short for its warm-up: the last step of a warm-up is
slightly below the peak."""
BUSY = 0.9
"""Share of the usable cores from which the processor counts as fully used."""
Limit = Literal["compute", "communication", "data", "other"]


@dataclass(frozen=True)
class BatchGain:
    """Speed-up of a point over fewer ranks at the same batch size."""

    baseline: str
    """Name of the baseline."""
    speed_up: Estimate
    """Samples per second ÷ those of the baseline, paired by repeat."""
    unequal_cores: str
    """Phrase on the cores of the baseline, where they are not those of each rank; empty if they are."""


@dataclass(frozen=True)
class BatchPoint:
    """A strategy on some ranks at one batch size. A value is None if nothing was measured."""

    row: CandidateRow
    size: int
    """Batch size as the user gave it: the global batch, or the batch per rank."""
    ranks: int
    hosts: int
    ranks_per_host: int
    batch: int
    """Global batch."""
    batch_per_rank: float
    threads: int | None
    """Compute threads of each rank; None if no run was recorded."""
    epoch_s: Estimate | None
    epoch_without_data_s: Estimate | None
    """Time of an epoch minus the time in which batches are loaded."""
    epoch_data_s: Estimate | None
    epoch_computing_s: Estimate | None
    epoch_communicating_s: Estimate | None
    epoch_exposed_s: Estimate | None
    epoch_is_measured: bool
    """Whether whole epochs were trained; otherwise their time is extrapolated from that of a step."""
    over_fewest: BatchGain | None
    """Gain over the fewest ranks; None for these, and for a point whose ranks share cores."""
    over_smallest: Estimate | None
    """Samples per second ÷ those of the smallest size on the same ranks, paired by repeat."""
    utilisation: float | None
    """busbw of the isolated operations that carry most gradients ÷ the bandwidth of the link."""
    link_share: float | None
    """Bytes that the busiest rank sends in a step ÷ the time of communication ÷ the bandwidth of the link."""
    flop_per_s: Estimate | None
    """FLOP per second of the model's forward and backward passes."""
    mfu: Estimate | None
    """Model FLOP utilisation: `flop_per_s` ÷ the peak of the processors."""
    cpu_cores: Estimate | None
    """Cores that the ranks keep busy."""
    cpu_share: Estimate | None
    """The same ÷ the usable cores of their hosts."""
    lr: float | None
    """Peak learning rate, scaled to the batch; None if runs were not trained, or set it themselves."""
    end_loss: Estimate | None
    """Training loss over the last epoch."""
    end_accuracy: Estimate | None
    """Training accuracy over the last epoch."""
    equal_time_loss: Estimate | None
    """Training loss over the epoch's worth of samples before the time at which the first run of the repeat ended."""
    equal_time_accuracy: Estimate | None
    equal_time_test_loss: Estimate | None
    """Test loss at the last evaluation by that time; None if runs were not tested while they trained."""
    equal_time_test_accuracy: Estimate | None
    out_of_memory: OutOfMemory
    """Whether it failed because a rank ran out of memory."""
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
    def rate(self) -> float:
        """Samples per second; 0 if it was not measured or failed."""
        return self.row.samples_per_s.value if self.row.is_measured and self.row.samples_per_s else 0.0

    @property
    def is_sound(self) -> bool:
        """Whether it computes the same as one process, and no run has diverged."""
        return self.row.exclusion is None and not self.row.diverged

    @property
    def speed_up(self) -> Estimate | None:
        """Speed-up over the fewest ranks."""
        return None if self.over_fewest is None else self.over_fewest.speed_up

    @property
    def limit(self) -> tuple[Limit, float] | None:
        """Largest part of its step, with its share of the step; None without events."""
        split = self.row.split
        if split is None:
            return None
        mean = split.mean
        parts: dict[Limit, float] = {
            "compute": mean.computing_s,
            "communication": mean.exposed_s,
            "data": mean.data_s,
            "other": mean.other_s - mean.data_s,
        }
        largest = max(parts, key=parts.__getitem__)
        return largest, parts[largest] / mean.step_s


@dataclass(frozen=True)
class BatchCurve:
    """Points of a strategy on the same ranks, smallest batch first."""

    strategy: str
    ranks: int
    hosts: int
    points: list[BatchPoint]

    @property
    def measured(self) -> list[BatchPoint]:
        """Points that were measured and did not fail."""
        return [point for point in self.points if point.rate]

    @property
    def counted(self) -> list[BatchPoint]:
        """Measured points that can be recommended; all that were measured if there is none."""
        return counted_points(self.points)

    @property
    def best(self) -> BatchPoint | None:
        """Point with the most samples per second of those that count; None if nothing was measured."""
        return max(self.counted, key=lambda point: point.rate, default=None)

    @property
    def enough(self) -> BatchPoint | None:
        """Smallest batch with at least 95% of the best samples per second."""
        best = self.best
        return next((own for own in self.counted if best is not None and own.rate >= (1 - WITHIN) * best.rate), None)

    @property
    def first_without_memory(self) -> BatchPoint | None:
        """Smallest batch that ran out of memory, at least probably; None if there is none."""
        return next((point for point in self.points if point.out_of_memory), None)


@dataclass(frozen=True)
class BatchSizes:
    """Result of an experiment over batch sizes."""

    comparison: Comparison
    """Comparison of the same runs: rows, parity proofs, failures."""
    curves: list[BatchCurve]
    """Ordered by ranks, then by strategy."""
    warnings: list[str]
    design: BatchDesign
    equal_time_s: Estimate | None
    """Training time of the run that ended first, over repeats; None if runs were not trained for epochs or a time."""

    @property
    def record_set(self) -> RecordSet:
        """Records of the experiment."""
        return self.comparison.record_set

    @property
    def points(self) -> list[BatchPoint]:
        """All points, by curve and then by size."""
        return [point for curve in self.curves for point in curve.points]

    @property
    def best(self) -> BatchPoint | None:
        """Point with the most samples per second of those that count; None if nothing was measured."""
        return max(counted_points(self.points), key=lambda point: point.rate, default=None)

    @property
    def alternatives(self) -> list[Alternative]:
        """Fastest point of each strategy that is faster than the best, and does not compute the same."""
        if self.best is None or self.best.row.exclusion is not None:
            return []
        found: dict[str, Alternative] = {}
        for alternative in self.comparison.alternatives_to(self.best.candidate.name):
            found.setdefault(alternative.row.candidate.strategy, alternative)
        return list(found.values())

    def rate_ratio(self, one: BatchPoint, other: BatchPoint) -> Estimate | None:
        """Return the samples per second of one point ÷ those of another, paired by repeat."""
        return self.comparison.speed_up(one.candidate.name, over=other.candidate.name)

    def ratio_of_chosen(self, one: BatchPoint, other: BatchPoint, points: int) -> Estimate | None:
        """Return the same for the fastest of some points, with an interval that is corrected for their number."""
        level = 1 - ERROR_RATE / max(1, points - 1)
        return self.comparison.speed_up(one.candidate.name, over=other.candidate.name, level=level)

    @property
    def epochs_are_extrapolated(self) -> bool:
        """Whether the times per epoch, which are treated alike at all points, are extrapolated."""
        return any(point.epoch_s and not point.epoch_is_measured for point in self.points)

    @property
    def threads_differ(self) -> bool:
        """Whether ranks of some points have more compute threads than those of others."""
        return len({point.threads for point in self.points if point.threads is not None}) > 1

    def accuracy_difference(self, one: BatchPoint, other: BatchPoint) -> Estimate | None:
        """Return the test accuracy of one point minus that of another, paired by seed, from 3 seeds or more."""
        return accuracy_gain(self.record_set, one.candidate.name, other.candidate.name)

    def most_accurate(self, curve: BatchCurve) -> BatchPoint | None:
        """Return the point of a curve with the highest test accuracy; None if nothing was tested."""
        tested = [(point.row.test_accuracy.value, point) for point in curve.counted if point.row.test_accuracy]
        return max(tested, key=lambda pair: pair[0])[1] if tested else None


def batch_sizes(record_set: RecordSet) -> BatchSizes:
    """Return the results of an experiment over batch sizes; raise `RecordError` if the records are not exactly one."""
    design = record_set.designs[0] if len(record_set.designs) == 1 else None
    if not isinstance(design, BatchDesign) or any(candidate.point is None for candidate in record_set.candidates):
        raise RecordError(
            "these records are not one experiment over batch sizes.", hint="name the folder of one `paceline batch`"
        )
    measured = _BatchMeasurements(compare(record_set), design)
    points = [measured.point(candidate) for candidate in record_set.candidates]
    spreads = {row.candidate.name: row.rank_step_spread for row in measured.comparison.rows}
    warnings = [*_notes(points, design, record_set), *caveats(record_set, spreads, shared_cores=False)]
    ends = list(measured.equal_times.values()) if design.trains else []
    return BatchSizes(measured.comparison, _curves(points), warnings, design, estimate_times(ends))


class _BatchMeasurements:
    """Measurements by candidate, from which points are built."""

    def __init__(self, comparison: Comparison, design: BatchDesign) -> None:
        self.comparison = comparison
        self.record_set = comparison.record_set
        self.design = design
        self.rows = {row.candidate.name: row for row in comparison.rows}
        self.converging = {name: converging_runs(self.record_set, name) for name in self.rows}
        self.equal_times = _first_ends(self.converging.values())
        measured = [name for name, row in self.rows.items() if row.is_measured]
        self.measures_epochs = design.trains and all(map(self._has_whole_epoch, measured))
        """Whether every point trained a whole epoch. Otherwise all are extrapolated, so that they are comparable."""
        failures = events_of(self.record_set.events, FailureEvent)
        self.out_of_memory = {event.candidate: event.out_of_memory for event in failures}

    def point(self, candidate: Candidate) -> BatchPoint:
        """Return the point of a candidate."""
        name, point = candidate.name, _point_of(candidate)
        records = [recorded.run for recorded in self.record_set.recorded_runs_of(name)]
        trained = self.converging[name] if self.design.trains else {}
        row = self.rows[name]
        oversubscribed = oversubscription(records[0].topology, self.design) if records else ""
        epochs = self._epochs(records)
        flop_per_s, mfu = self._flop(row, records)
        ends = [progress_at(run, training_time(run)) for run in trained.values()]
        at_equal_time = [progress_at(run, self.equal_times[repeat]) for repeat, run in trained.items()]
        tests = [
            result_at(validation_curve(run), self.equal_times[repeat] * (1 + 1e-9))  # Sums of floats are rounded.
            for repeat, run in trained.items()
            if is_tested_in_training(run)
        ]
        return BatchPoint(
            row=row,
            size=self._size(candidate),
            ranks=point.ranks,
            hosts=point.hosts,
            ranks_per_host=point.ranks_per_host,
            batch=point.batch,
            batch_per_rank=point.batch_per_rank,
            threads=records[0].topology.threads if records else None,
            epoch_s=estimate_times([time.seconds for time in epochs]),
            epoch_without_data_s=_part(epochs, lambda time: time.without_data_s),
            epoch_data_s=_part(epochs, lambda time: time.data_s),
            epoch_computing_s=_part(epochs, lambda time: time.computing_s),
            epoch_communicating_s=_part(epochs, lambda time: time.communicating_s),
            epoch_exposed_s=_part(epochs, lambda time: time.exposed_s),
            epoch_is_measured=bool(epochs) and all(time.is_measured for time in epochs),
            over_fewest=None if oversubscribed else self._over_fewest(candidate),
            over_smallest=self._over_smallest(candidate),
            utilisation=self._utilisation(name),
            link_share=self._link_share(row),
            flop_per_s=flop_per_s,
            mfu=mfu,
            cpu_cores=estimate_levels(_known(map(_busy_cores, records))),
            cpu_share=estimate_levels(_known(self._busy_share(run) for run in records)),
            lr=_reached_rate(records) if self.design.trains else None,
            end_loss=estimate_levels(_known(own and own.loss for own in ends)),
            end_accuracy=estimate_shares(_known(own and own.accuracy for own in ends)),
            equal_time_loss=_losses(at_equal_time),
            equal_time_accuracy=estimate_shares(_known(own and own.accuracy for own in at_equal_time)),
            equal_time_test_loss=estimate_levels([own.loss for own in tests if own and math.isfinite(own.loss)]),
            equal_time_test_accuracy=estimate_shares(_known(own and own.accuracy for own in tests)),
            out_of_memory=self.out_of_memory.get(name, False),
            oversubscribed=oversubscribed,
        )

    def _epochs(self, runs: Sequence[RunRecord]) -> list[EpochTime]:
        """Return the times of an epoch: only measured ones, or only extrapolated ones."""
        times = [time for run in runs if (time := epoch_time(run, whole=self.measures_epochs)) is not None]
        return [time for time in times if time.is_measured == self.measures_epochs]

    def _has_whole_epoch(self, name: str) -> bool:
        times = [epoch_time(run, whole=True) for run in self.record_set.runs_of(name).values()]
        return any(time is not None and time.is_measured for time in times)

    def _size(self, candidate: Candidate) -> int:
        point = _point_of(candidate)
        return round(point.batch_per_rank) if self.design.per_rank else point.batch

    def _over_fewest(self, candidate: Candidate) -> BatchGain | None:
        """Return the gain over the fewest ranks at the same size: `single`, or the same strategy."""
        own = _point_of(candidate)
        others = [
            other
            for other in self.record_set.candidates
            if self._size(other) == self._size(candidate)
            and _point_of(other).ranks < own.ranks
            and other.strategy in (candidate.strategy, *_baselines(self.record_set.candidates))
        ]
        baseline = min(others, key=lambda other: _point_of(other).ranks, default=None)
        return None if baseline is None else self._gain(candidate, baseline)

    def _over_smallest(self, candidate: Candidate) -> Estimate | None:
        own = _point_of(candidate)
        same = [
            other
            for other in self.record_set.candidates
            if (other.strategy, _point_of(other).ranks, _point_of(other).hosts)
            == (candidate.strategy, own.ranks, own.hosts)
            and self.rows[other.name].is_measured
        ]
        smallest = min(same, key=self._size, default=None)
        gain = None if smallest is None else self._gain(candidate, smallest)
        return None if gain is None else gain.speed_up

    def _gain(self, candidate: Candidate, baseline: Candidate) -> BatchGain | None:
        if not (self.rows[candidate.name].is_measured and self.rows[baseline.name].is_measured):
            return None
        speed_up = self.comparison.costs.ratio(baseline.name, candidate.name)
        if speed_up is None:
            return None
        own, base = (self.record_set.recorded_runs_of(one.name)[0].run.topology for one in (candidate, baseline))
        return BatchGain(baseline.name, speed_up, unequal_cores(baseline, base, own, self.design))

    @property
    def _link_bytes_per_s(self) -> float | None:
        examination = self.comparison.examination
        return examination.link.bytes_per_s if examination is not None and examination.link is not None else None

    def _utilisation(self, name: str) -> float | None:
        wire, bandwidth = self.comparison.wires.get(name), self._link_bytes_per_s
        known = [one for one in (wire.traffic if wire else []) if one.purpose == "gradients" and one.busbw is not None]
        most = max(known, key=lambda one: one.bytes_per_step, default=None)
        return None if most is None or most.busbw is None or bandwidth is None else most.busbw / bandwidth

    def _link_share(self, row: CandidateRow) -> float | None:
        communication_s = 0.0 if row.split is None else row.split.mean.communication_s
        if not row.busiest_sent_bytes or not communication_s or self._link_bytes_per_s is None:
            return None
        return row.busiest_sent_bytes / communication_s / self._link_bytes_per_s

    def _flop(self, row: CandidateRow, runs: Sequence[RunRecord]) -> tuple[Estimate | None, Estimate | None]:
        each = runs[0].topology.flop_per_sample if runs else None
        if each is None or row.samples_per_s is None:
            return None, None
        peak = peak_flop_per_s(runs[0], self.design)
        return row.samples_per_s.scaled(each), None if peak is None else row.samples_per_s.scaled(each / peak)

    def _busy_share(self, run: RunRecord) -> float | None:
        busy, topology = _busy_cores(run), run.topology
        hosts = hosts_of(topology)
        shared = self.design.host_cpus is None and topology.device == "cpu"
        cores = topology.cores * (len(set(machines_of(self.design, hosts))) if shared else hosts)
        return None if busy is None else busy / cores


def _busy_cores(run: RunRecord) -> float | None:
    """Return the cores that the ranks that train keep busy together; None if that is unknown of one of them."""
    shares = [rank.cpu_share for rank in run.summary.ranks] if run.summary else []
    known = [share for share in shares if share is not None]
    return sum(known) if known and len(known) == len(shares) else None


def counted_points(points: Iterable[BatchPoint]) -> list[BatchPoint]:
    """Return the measured points that can be recommended; if there is none, those that compute the same, or all."""
    measured = [point for point in points if point.rate]
    same = [point for point in measured if point.row.exclusion is None]
    return [point for point in same if point.is_sound] or same or measured


def _first_ends(runs_of: Iterable[Mapping[Repeat, RunRecord]]) -> dict[Repeat, float]:
    """Return, for every repeat, the training time of its run that ended first."""
    ends: dict[Repeat, list[float]] = {}
    for runs in runs_of:
        for repeat, run in runs.items():
            ends.setdefault(repeat, []).append(training_time(run))
    return {repeat: min(times) for repeat, times in ends.items()}


def _losses(found: Sequence[Progress | None]) -> Estimate | None:
    return estimate_levels(_known(own and own.loss for own in found))


def _part(epochs: Sequence[EpochTime], read: Callable[[EpochTime], float | None]) -> Estimate | None:
    """Estimate a part of the epoch as times are, so that it is at most the whole; a part of 0 has no logarithm."""
    values = _known(map(read, epochs))
    return estimate_times(values) if all(value > 0 for value in values) else estimate_levels(values)


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def _baselines(candidates: Sequence[Candidate]) -> set[str]:
    return {candidate.strategy for candidate in candidates if candidate.role == "baseline"}


def _point_of(candidate: Candidate) -> CandidatePoint:
    assert candidate.point is not None
    return candidate.point


def _curves(points: Sequence[BatchPoint]) -> list[BatchCurve]:
    groups: dict[tuple[str, int, int], list[BatchPoint]] = {}
    for point in points:
        groups.setdefault((point.strategy, point.ranks, point.hosts), []).append(point)
    curves = [BatchCurve(*key, sorted(own, key=lambda point: point.size)) for key, own in groups.items()]
    return sorted(curves, key=lambda curve: (curve.ranks, -curve.hosts))


def _notes(points: Sequence[BatchPoint], design: BatchDesign, record_set: RecordSet) -> list[str]:
    """Return sentences on sizes that were left out, ranks that share cores, placement, and the learning rate."""
    shared = dict.fromkeys(point.oversubscribed for point in points if point.oversubscribed)
    notes = [*design.left_out, *[f"{reason}, so no speed-up is reported for them." for reason in shared]]
    gains = [point.over_fewest for point in points if point.over_fewest is not None]
    notes += [
        f"{reason}: the speed-up is one over different cores per rank. Set --threads to give every rank as many."
        for reason in dict.fromkeys(gain.unequal_cores for gain in gains if gain.unequal_cores)
    ]
    notes += _peak_beside_load(points, design)
    notes += placement_notes(design, [(point.hosts, point.ranks_per_host) for point in points])
    return [*notes, *_learning_rate_notes(points, record_set), *_short_runs(points, record_set)]


def _peak_beside_load(points: Sequence[BatchPoint], design: BatchDesign) -> list[str]:
    """Return a sentence on MFU if other programs used the cores while the peak was measured."""
    load, cores = design.core_other_load, design.machine_cores
    if load is None or not is_notable(load, cores) or all(point.mfu is None for point in points):
        return []
    return [
        f"Other programs used {TENTHS.text(load)} of {format_cores(cores)} while the peak of the processor was "
        "measured, so that it may be too low, and MFU too high. Repeat on a quiet machine for the MFU."
    ]


def _reached_rate(records: Sequence[RunRecord]) -> float | None:
    """Return the highest learning rate of a point; that of its recipe if only that was recorded."""
    return highest_rate(records) or (records[0].topology.lr if records else None)


def _short_runs(points: Sequence[BatchPoint], record_set: RecordSet) -> list[str]:
    """Return a sentence on sizes whose runs are too short for the peak learning rate of the recipe."""
    found: dict[int, str] = {}
    for point in points:
        planned = next((run.topology.lr for run in record_set.runs_of(point.candidate.name).values()), None)
        if point.lr is not None and planned is not None and point.lr < REACHED * planned:
            found[point.batch] = f"{short(point.lr, 3)} in place of {short(planned, 3)} at batch {whole(point.batch)}"
    if not found:
        return []
    return [
        f"Runs are too short for their warm-up, so the learning rate reaches only {join_names(list(found.values()))}. "
        "Train for more epochs to compare accuracies."
    ]


def _learning_rate_notes(points: Sequence[BatchPoint], record_set: RecordSet) -> list[str]:
    """Return a sentence on how the peak learning rate depends on the batch; none if it was not recorded."""
    rates = {point.batch: point.lr for point in points if point.lr is not None}
    if not rates:
        return []
    first, last = min(rates), max(rates)
    if len(set(rates.values())) == 1:
        rate = short(rates[first])
        return [f"The learning rate is {rate} at every batch size: another one may suit larger batches better."]
    rules = {recipe.scale_lr for entry in record_set.runs if (recipe := entry.run.topology.recipe) is not None}
    by = f" by {rules.pop()}" if len(rules) == 1 else ""
    ends = f"from {short(rates[first], 3)} at batch {whole(first)} to {short(rates[last], 3)} at batch {whole(last)}"
    return [f"The learning rate was scaled{by}, {ends}."]

"""Batch-size efficiency: every value of an experiment over batch sizes, from its record alone.

The speed-up of a point is its samples per second ÷ those on the fewest ranks at the same size, paired by repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.analysis.batch.epochs import EpochTime, epoch_time
from paceline.analysis.batch.notes import notes_on
from paceline.analysis.batch.peaks import peak_flop_per_s
from paceline.analysis.batch.points import BatchCurve, BatchGain, BatchPoint, BatchSizes
from paceline.analysis.batch.progress import Progress, progress_at, training_time
from paceline.analysis.caveats import caveats
from paceline.analysis.comparison import (
    CandidateRow,
    Comparison,
    compare,
    is_tested_in_training,
)
from paceline.analysis.curves import highest_rate, result_at, validation_curve
from paceline.analysis.learning import Repeat, converging_runs
from paceline.analysis.record_set import RecordSet
from paceline.analysis.scaling.machines import hosts_of, machines_of, oversubscription, unequal_cores
from paceline.analysis.statistics import (
    Estimate,
    estimate_levels,
    estimate_losses,
    estimate_shares,
    estimate_times,
)
from paceline.errors import RecordError
from paceline.records import RunRecord
from paceline.records.events import FailureEvent, events_of
from paceline.records.experiment.design import BatchDesign, Candidate, CandidatePoint


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
    curves = _curves(points)
    warnings = [
        *notes_on(points, design, record_set),
        *measured.comparison.costs.contradictions(_shown_ratios(curves)),
        *caveats(record_set, spreads, shared_cores=False),
    ]
    ends = list(measured.equal_times.values()) if design.trains else []
    return BatchSizes(measured.comparison, curves, warnings, design, estimate_times(ends))


def _shown_ratios(curves: Sequence[BatchCurve]) -> Iterator[tuple[str, str]]:
    """Yield the candidates whose ratios are shown: over the smallest batch, and over the fewest ranks."""
    for curve in curves:
        for point in curve.measured:
            yield point.candidate.name, curve.measured[0].candidate.name
            if point.over_fewest is not None:
                yield point.candidate.name, point.over_fewest.baseline


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
            end_loss=estimate_losses(_known(own and own.loss for own in ends)),
            end_accuracy=estimate_shares(_known(own and own.accuracy for own in ends)),
            equal_time_loss=_losses(at_equal_time),
            equal_time_accuracy=estimate_shares(_known(own and own.accuracy for own in at_equal_time)),
            equal_time_test_loss=estimate_losses([own.loss for own in tests if own and math.isfinite(own.loss)]),
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


def _reached_rate(records: Sequence[RunRecord]) -> float | None:
    """Return the highest learning rate of a point; that of its recipe if only that was recorded."""
    return highest_rate(records) or (records[0].topology.lr if records else None)

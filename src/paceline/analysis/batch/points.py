"""Points of an experiment over batch sizes, the curves that they make, and the result of the whole.

A point is a strategy on some ranks at one batch size. A curve has the points of one strategy on the same ranks over all
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.analysis.comparison import (
    Alternative,
    CandidateRow,
    Comparison,
)
from paceline.analysis.decision import ERROR_RATE
from paceline.analysis.learning import accuracy_gain
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import (
    Estimate,
)
from paceline.errors import OutOfMemory
from paceline.records.experiment.design import BatchDesign, Candidate

WITHIN = 0.05
"""Share of the highest samples per second that a smaller batch may lose and still count as large enough."""
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


def counted_points(points: Iterable[BatchPoint]) -> list[BatchPoint]:
    """Return the measured points that can be recommended; if there is none, those that compute the same, or all."""
    measured = [point for point in points if point.rate]
    same = [point for point in measured if point.row.exclusion is None]
    return [point for point in same if point.is_sound] or same or measured

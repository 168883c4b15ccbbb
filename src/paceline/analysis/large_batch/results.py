"""Results of an experiment with large batches: accuracies and losses of each candidate, against two others.

`lost` compares a candidate with the reference, `gained` with plain training at the same batch. `added` compares a
combination of remedies with the same one without one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.batch.progress import Progress, progress_at, training_time
from paceline.analysis.chance import Chance, chance_of
from paceline.analysis.comparison import CandidateRow, Comparison, compare
from paceline.analysis.curves import EvaluatedPoint, highest_rate, validation_curve
from paceline.analysis.divergence import divergence_of
from paceline.analysis.learning import accuracy_gain, converging_runs
from paceline.analysis.noise_scale import epochs_factor
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import LEVEL, Estimate, estimate_losses, estimate_shares, paired_difference
from paceline.errors import RecordError
from paceline.records import RunRecord
from paceline.records.experiment.design import Candidate, LargeBatchDesign, LargeBatchVariant

REPAIRED = 0.02
"""Test accuracy that training may lose against the reference and still count as repaired."""


@dataclass(frozen=True)
class RemedyGain:
    """Test accuracy that a remedy adds to others."""

    remedy: str
    added: Estimate
    """Accuracy with it minus that without it, paired by seed."""


@dataclass(frozen=True)
class LargeBatchRow:
    """Results of one candidate. A value is None if it was not measured."""

    row: CandidateRow
    batch: int
    """Global batch."""
    remedies: tuple[str, ...]
    is_reference: bool
    lr: float | None
    """Highest learning rate that a run reached."""
    updates: float | None
    """Updates of the weights in a run; the median over its runs."""
    runs: int
    """Runs that have ended: at their length, or because the loss diverged."""
    end_loss: Estimate | None
    """Training loss over the last epoch, of the runs that have not diverged, as the accuracies."""
    end_accuracy: Estimate | None
    """Training accuracy over the last epoch."""
    lost: Estimate | None
    """Test accuracy minus that of the reference, paired by seed; None for the reference."""
    gained: Estimate | None
    """Test accuracy minus that of plain training at the same batch, paired by seed; None for plain training."""
    added: tuple[RemedyGain, ...]
    """Gain of each of its remedies over its others, where the combination without it was trained, too."""
    epochs_factor: float | None
    """Epochs that it needs ÷ those of the reference for the same loss, as the noise scale of the reference predicts."""
    is_at_chance: bool
    """Whether its test accuracy is one that guessing explains."""
    predicted_accuracy: float | None
    """Test accuracy of the reference after its epochs ÷ `epochs_factor`; None if it was not tested by then."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a large batch without any remedy."""
        return not self.is_reference and not self.remedies

    @property
    def diverged_runs(self) -> int:
        """Number of runs whose loss diverged."""
        return len(self.row.diverged)

    @property
    def accuracy(self) -> float | None:
        """Median test accuracy of the runs that have not diverged."""
        return None if self.row.test_accuracy is None else self.row.test_accuracy.value

    @property
    def is_repaired(self) -> bool:
        """Whether it loses at most `REPAIRED` of test accuracy against the reference, and no run has diverged."""
        return self.lost is not None and self.lost.value >= -REPAIRED and not self.diverged_runs


@dataclass(frozen=True)
class LargeBatches:
    """Results of an experiment with large batches."""

    comparison: Comparison
    design: LargeBatchDesign
    reference: LargeBatchRow
    by_size: dict[int, list[LargeBatchRow]]
    """Candidates of each large batch, plain training first."""

    @property
    def record_set(self) -> RecordSet:
        """Records of the experiment."""
        return self.comparison.record_set

    @property
    def rows(self) -> list[LargeBatchRow]:
        """All candidates, the reference first."""
        return [self.reference, *[row for rows in self.by_size.values() for row in rows]]

    @property
    def noise_scale(self) -> Estimate | None:
        """Gradient noise scale of the reference, in samples."""
        return self.reference.row.noise_scale

    def plain(self, size: int) -> LargeBatchRow | None:
        """Return plain training at a large batch; None if there is none."""
        return next((row for row in self.by_size.get(size, []) if row.is_plain), None)

    def best(self, size: int) -> LargeBatchRow | None:
        """Return the candidate of a large batch with the highest test accuracy; None if none was tested."""
        tested = [(row.accuracy, row) for row in self.by_size.get(size, []) if row.accuracy is not None]
        return max(tested, key=lambda pair: pair[0])[1] if tested else None


def large_batches(record_set: RecordSet) -> LargeBatches:
    """Return the results of an experiment with large batches from its records."""
    design = record_set.designs[0] if record_set.designs else None
    if not isinstance(design, LargeBatchDesign) or any(one.variant is None for one in record_set.candidates):
        raise RecordError(f"{', '.join(record_set.sources)} is damaged: a candidate has no batch and remedies.")
    comparison = compare(record_set)
    noise = comparison.row(_reference_of(record_set, design).name).noise_scale
    chance = chance_of(entry.run for entry in record_set.runs)
    rows = [_row(comparison, design, candidate, noise, chance) for candidate in record_set.candidates]
    by_size = {size: [row for row in rows if row.batch == size and not row.is_reference] for size in design.sizes}
    return LargeBatches(comparison, design, next(row for row in rows if row.is_reference), by_size)


def _row(
    comparison: Comparison,
    design: LargeBatchDesign,
    candidate: Candidate,
    noise: Estimate | None,
    chance: Chance | None,
) -> LargeBatchRow:
    record_set, variant = comparison.record_set, _variant_of(candidate)
    reference = _reference_of(record_set, design)
    is_reference = candidate.name == reference.name
    runs = converging_runs(record_set, candidate.name)
    recorded = [entry.run for entry in record_set.recorded_runs_of(candidate.name)]
    ends = [progress_at(run, training_time(run)) for run in runs.values()]
    row = comparison.row(candidate.name)
    factor = None if noise is None else epochs_factor(noise.value, variant.batch, design.reference_batch)
    return LargeBatchRow(
        row=row,
        batch=variant.batch,
        remedies=tuple(variant.remedies),
        is_reference=is_reference,
        lr=highest_rate(recorded),
        updates=statistics.median([run.summary.steps for run in runs.values() if run.summary]) if runs else None,
        runs=sum(run.finished or divergence_of(run) is not None for run in recorded),
        end_loss=estimate_losses([end.loss for end in ends if end is not None and end.loss is not None]),
        end_accuracy=estimate_shares(_accuracies(ends)),
        lost=None if is_reference else accuracy_difference(record_set, candidate, reference),
        gained=_over(record_set, candidate, ()) if variant.remedies else None,
        added=tuple(_added(record_set, candidate)) if len(variant.remedies) > 1 else (),
        epochs_factor=factor,
        is_at_chance=chance is not None and row.test_accuracy is not None and row.test_accuracy.value <= chance.most,
        predicted_accuracy=None if factor is None else _accuracy_after(record_set, reference, design.epochs / factor),
    )


def accuracy_difference(record_set: RecordSet, one: Candidate, other: Candidate) -> Estimate | None:
    """Return the test accuracy of one candidate minus that of another, paired by seed; an interval from 3 seeds on.

    The interval is not corrected for the number of candidates: each difference is of interest for itself, and no best
    one is chosen by it.
    """
    found = accuracy_gain(record_set, one.name, other.name, LEVEL)
    if found is not None:
        return found
    ones, others = (_test_accuracies(record_set, candidate.name) for candidate in (one, other))
    return paired_difference(ones, others)


def _over(record_set: RecordSet, candidate: Candidate, remedies: Sequence[str]) -> Estimate | None:
    """Return the accuracy of a candidate minus that of the one with the same batch and these remedies."""
    batch = _variant_of(candidate).batch
    others = [
        one
        for one in record_set.candidates
        if _variant_of(one) == LargeBatchVariant(batch=batch, remedies=list(remedies))
    ]
    return accuracy_difference(record_set, candidate, others[-1]) if others else None


def _added(record_set: RecordSet, candidate: Candidate) -> list[RemedyGain]:
    remedies = _variant_of(candidate).remedies
    without = {one: _over(record_set, candidate, [other for other in remedies if other != one]) for one in remedies}
    return [RemedyGain(remedy, added) for remedy, added in without.items() if added is not None]


def _accuracy_after(record_set: RecordSet, candidate: Candidate, epochs: float) -> float | None:
    """Return the median test accuracy after so many epochs, interpolated between evaluations; None if unknown."""
    curves = [validation_curve(run) for run in converging_runs(record_set, candidate.name).values()]
    found = [accuracy for curve in curves if (accuracy := _interpolated(curve, epochs)) is not None]
    return statistics.median(found) if found else None


def _interpolated(curve: Sequence[EvaluatedPoint], epochs: float) -> float | None:
    points = [(p.epochs, p.accuracy) for p in curve if p.epochs is not None and p.accuracy is not None]
    if not points or not points[0][0] <= epochs * (1 + 1e-9):
        return None
    after = next((place for place, point in enumerate(points) if point[0] >= epochs), len(points) - 1)
    (end, high), (start, low) = points[after], points[max(0, after - 1)]
    share = 1.0 if end == start else (epochs - start) / (end - start)
    return low + min(1.0, share) * (high - low)


def _test_accuracies(record_set: RecordSet, name: str) -> Mapping[tuple[int, int], float]:
    tests = {repeat: _accuracy(run) for repeat, run in converging_runs(record_set, name).items()}
    return {repeat: accuracy for repeat, accuracy in tests.items() if accuracy is not None}


def _accuracy(run: RunRecord) -> float | None:
    return run.summary.test.accuracy if run.summary and run.summary.test else None


def _accuracies(ends: Sequence[Progress | None]) -> list[float]:
    return [end.accuracy for end in ends if end is not None and end.accuracy is not None]


def _reference_of(record_set: RecordSet, design: LargeBatchDesign) -> Candidate:
    return next(one for one in record_set.candidates if one.name == design.reference)


def _variant_of(candidate: Candidate) -> LargeBatchVariant:
    assert candidate.variant is not None, "the candidates of an experiment with large batches have a variant"
    return candidate.variant

"""Test accuracies and losses of candidates, paired by seed, and the setting that has learned best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.analysis.chance import chance_of
from paceline.analysis.decision import ERROR_RATE
from paceline.analysis.divergence import divergence_of
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import MIN_REPEATS, Estimate, limited, paired_difference
from paceline.records import RunRecord
from paceline.records.experiment.design import Candidate
from paceline.records.summary import EvaluationResult

Repeat = tuple[int, int]
LearningMeasure = Literal["accuracy", "loss"]
SMALL_DIFFERENCE = 0.02
"""Difference in test accuracy that is treated as none if the whole interval is smaller."""


@dataclass(frozen=True)
class Learning:
    """Candidate that has learned best, among candidates with different settings, compared with the fastest."""

    measure: LearningMeasure
    best: str
    """Candidate with the highest median test accuracy; with the lowest test loss, if there is no accuracy."""
    best_value: float
    other: str
    """The fastest candidate; if that is the best one, the next best."""
    other_value: float
    seeds: int
    """Number of common seeds."""
    difference: Estimate | None
    """Value of the best minus that of the other, paired by seed, from 3 seeds or more, with an interval that is
    corrected for the number of candidates."""

    @property
    def is_clear(self) -> bool:
        """Whether the difference exceeds the spread between seeds, and is not too small to matter."""
        found = self.difference
        sign = {measure: sign for measure, _, sign in MEASURES}[self.measure]
        if found is None or found.low is None or found.spans(0) or sign * found.value < 0:
            return False
        return self.measure == "loss" or not found.within(-SMALL_DIFFERENCE, SMALL_DIFFERENCE)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        difference = None if self.difference is None else self.difference.to_dict()
        named = {"measure": self.measure, "best": self.best, "other": self.other, "seeds": self.seeds}
        return named | {"difference": difference, "is_clear": self.is_clear}


def learning_of(record_set: RecordSet, candidates: Sequence[Candidate], fastest: str) -> Learning | None:
    """Return which of some candidates has learned best, against the fastest of them.

    None if they do not differ in settings, if they were not tested, or if all accuracies are at chance level.
    Candidates with the same settings as the fastest are left out: they compute the same as it.
    """
    own = next((candidate for candidate in candidates if candidate.name == fastest), None)
    if own is None:
        return None
    names = [fastest, *[one.name for one in candidates if one.settings != own.settings]]
    for measure, read, sign in MEASURES:
        values = {name: found for name in names if (found := _values(record_set, name, read))}
        if fastest not in values or len(values) < 2:
            continue
        medians = {name: statistics.median(found.values()) for name, found in values.items()}  # As tables show them.
        if measure == "accuracy" and _is_chance(record_set, list(medians.values())):
            return None
        ranked = sorted(medians, key=lambda name: sign * medians[name], reverse=True)
        best, other = ranked[0], fastest if ranked[0] != fastest else ranked[1]
        common = [repeat for repeat in values[best] if repeat in values[other]]
        gain = accuracy_gain if measure == "accuracy" else _loss_difference
        return Learning(measure, best, medians[best], other, medians[other], len(common), gain(record_set, best, other))
    return None


def accuracy_gain(
    record_set: RecordSet, name: str, reference: str | None, level: float | None = None
) -> Estimate | None:
    """Return the difference of test accuracies, with an interval that includes the sampling error of the test set.

    None for fewer than `MIN_REPEATS` common seeds. Without a `level`, it is one corrected for the number of candidates.

    Accuracies are multiples of 1 ÷ test samples, so a few repeats may show the same difference without any spread. Each
    side has the binomial variance p(1 − p)/n over the choice of n test samples. All repeats use the same test samples,
    so more repeats do not reduce this variance.
    """
    if reference is None or name == reference:
        return None
    ones, others = _values(record_set, name, _accuracy), _values(record_set, reference, _accuracy)
    common = [repeat for repeat in ones if repeat in others]
    runs = [recorded.run for one in (name, reference) for recorded in record_set.recorded_runs_of(one)]
    tested = [test.samples for test in map(_test, runs) if test]
    if len(common) < MIN_REPEATS or not tested or min(tested) < 1:
        return None
    shares = [statistics.fmean(side[repeat] for repeat in common) for side in (ones, others)]
    variance = sum(share * (1 - share) for share in shares) / min(tested)
    return limited(paired_difference(ones, others, level or _level(record_set), shared_variance=variance), -1.0, 1.0)


def _loss_difference(record_set: RecordSet, name: str, reference: str) -> Estimate | None:
    """Return the difference of test losses, paired by seed; None for fewer than `MIN_REPEATS` common seeds."""
    ones, others = _values(record_set, name, _loss), _values(record_set, reference, _loss)
    if len([repeat for repeat in ones if repeat in others]) < MIN_REPEATS:
        return None
    return paired_difference(ones, others, _level(record_set))


def _level(record_set: RecordSet) -> float:
    return 1 - ERROR_RATE / max(1, len(record_set.candidates) - 1)


def converging_runs(record_set: RecordSet, name: str) -> dict[Repeat, RunRecord]:
    """Return the runs of a candidate whose losses and accuracies count: they are finished and have not diverged."""
    runs = record_set.runs_of(name).items()
    return {repeat: run for repeat, run in runs if run.finished and divergence_of(run) is None}


def _values(
    record_set: RecordSet, name: str, read: Callable[[EvaluationResult], float | None]
) -> Mapping[Repeat, float]:
    """Return a result of the tests by repeat, of the runs that count."""
    tests = {repeat: _test(run) for repeat, run in converging_runs(record_set, name).items()}
    return {repeat: value for repeat, test in tests.items() if test and (value := read(test)) is not None}


def _is_chance(record_set: RecordSet, accuracies: Sequence[float]) -> bool:
    """Return whether no accuracy is clearly above that of guessing."""
    chance = chance_of(entry.run for entry in record_set.runs)
    return chance is not None and max(accuracies) <= chance.most


def _test(run: RunRecord) -> EvaluationResult | None:
    return run.summary.test if run.summary else None


def _accuracy(test: EvaluationResult) -> float | None:
    return test.accuracy


def _loss(test: EvaluationResult) -> float | None:
    return test.loss


MEASURES: tuple[tuple[LearningMeasure, Callable[[EvaluationResult], float | None], int], ...] = (
    ("accuracy", _accuracy, 1),
    ("loss", _loss, -1),
)
"""Measures in the order of preference, how to read them, and whether more is better (1) or worse (-1)."""

"""Time per sample of every candidate in every repeat, with ratios and their intervals: the only source of either."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.analysis.moderated_variance import Variance, prior_of_pair, prior_of_windows, window_variance
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import LEVEL, Estimate, median_time, paired_ratio
from paceline.analysis.steps.timing import counted_windows, step_time, windows_of
from paceline.formatting import join_names
from paceline.records import RunRecord
from paceline.records.events import LogEvent

TimingKey = tuple[int, int]
VISIBLE = 0.005
"""Smallest relative difference that tables show."""


@dataclass(frozen=True)
class CostTable(Mapping[str, Mapping[Any, float]]):
    """Seconds per trained sample, by candidate and by the key that pairs runs: the repeat."""

    costs: Mapping[str, Mapping[Any, float]]
    window_variances: Mapping[str, Mapping[Any, float]] = field(default_factory=dict)
    """Variance of the logarithm of each cost, as far as the windows of the run show it."""

    def __getitem__(self, name: str) -> Mapping[Any, float]:
        """Return the costs of a candidate."""
        return self.costs[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the candidates."""
        return iter(self.costs)

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.costs)

    def ratio(self, one: str, other: str, level: float = LEVEL) -> Estimate | None:
        """Estimate the time per sample of one candidate ÷ that of another, from the repeats that both have.

        Without common repeats, return the ratio of the medians, without an interval; None if either has no costs.
        """
        ones, others = self.costs.get(one, {}), self.costs.get(other, {})
        return paired_ratio(ones, others, level, self._prior_of_pair(one, other))

    def contradicts_medians(self, one: str, other: str) -> bool:
        """Return whether the ratio of two candidates and that of their median times differ in direction.

        A ratio is paired by repeat, and medians are not, so both may be right where the load of the machine changes.
        """
        ratio = self.ratio(one, other)
        if ratio is None or ratio.repeats == 0:  # Without common repeats it is the ratio of the medians.
            return False
        medians = median_time(self.costs[one].values()) / median_time(self.costs[other].values())
        differences = ratio.value - 1, medians - 1
        return differences[0] * differences[1] < 0 and min(map(abs, differences)) > VISIBLE

    def contradictions(self, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
        """Yield notes on pairs (candidate, reference) whose ratio contradicts the median times beside it."""
        found: dict[str, list[str]] = {}
        for name, reference in dict.fromkeys(pairs):
            if self.contradicts_medians(name, reference):
                found.setdefault(reference, []).append(name)
        for reference, names in found.items():
            yield (
                f"{join_names(names)}: the ratio to {reference} and the median times contradict each other, because "
                "ratios are paired by repeat and medians are not. The ratio is more reliable, since the load of the "
                "machine changes from repeat to repeat."
            )

    def level_prior(self, name: str) -> Variance | None:
        """Return the prior for the variance of a candidate's own times.

        It is from windows alone: the effects of repeats are part of this variance, and all candidates share them.
        """
        return prior_of_windows(self._mean_window_variance(name, self.costs[name]))

    def _prior_of_pair(self, one: str, other: str) -> Variance | None:
        ones, others = self.costs.get(one, {}), self.costs.get(other, {})
        keys = [key for key in ones if key in others]
        measured_with = [
            [math.log(costs[key]) for key in keys]
            for name, costs in self.costs.items()
            if name not in (one, other) and all(key in costs for key in keys)
        ]
        windows = [self._mean_window_variance(name, keys) for name in (one, other)]
        known = [variance for variance in windows if variance is not None]
        return prior_of_pair(measured_with, sum(known) if len(known) == len(windows) else None)

    def _mean_window_variance(self, name: str, keys: Collection[Any]) -> float | None:
        """Return the mean over repeats of the variance by windows; None if it is unknown in all."""
        own = self.window_variances.get(name, {})
        known = [own[key] for key in keys if key in own]
        return statistics.fmean(known) if known else None


def cost_table(record_set: RecordSet) -> CostTable:
    """Return the costs of all candidates of a set of records."""
    names = [candidate.name for candidate in record_set.candidates]
    variances = {
        name: {
            entry.timing_key: variance
            for entry in record_set.recorded_runs_of(name)
            if (variance := _variance_by_windows(entry.run)) is not None
        }
        for name in names
    }
    return CostTable({name: cost_per_sample(record_set, name) for name in names}, variances)


def cost_per_sample(record_set: RecordSet, candidate: str) -> dict[TimingKey, float]:
    """Return seconds per trained sample, by timing key."""
    return {
        entry.timing_key: cost
        for entry in record_set.recorded_runs_of(candidate)
        if (cost := cost_of(entry.run)) is not None
    }


def cost_of(run: RunRecord) -> float | None:
    """Return the seconds per trained sample of a run; None if no window was timed."""
    step_s, samples = step_time(windows_of(run)), _samples_per_step(run)
    return step_s / samples if step_s and samples else None


def _samples_per_step(run: RunRecord) -> float | None:
    logs = run.events_of(LogEvent)[1:]
    steps = sum(len(event.losses) for event in logs)
    return sum(event.samples for event in logs) / steps if steps else None


def _variance_by_windows(run: RunRecord) -> float | None:
    times = [window.step_s for window in counted_windows(windows_of(run))]
    return window_variance([math.log(time) for time in times]) if all(time > 0 for time in times) else None

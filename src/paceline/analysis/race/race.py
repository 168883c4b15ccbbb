"""A race: the times of its runs, and its scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from paceline.analysis.comparison import Comparison, compare
from paceline.analysis.race.runs import RaceRun, race_run
from paceline.analysis.race.scores import score
from paceline.analysis.record_set import RecordSet
from paceline.records.events import EndEvent, events_of
from paceline.records.experiment.design import RaceDesign


@dataclass(frozen=True)
class Race:
    """Runs of one candidate to a test accuracy."""

    comparison: Comparison
    design: RaceDesign
    runs: list[RaceRun]
    """Runs in the order of their seeds."""
    score_s: float | None
    """Score by training time; None if too many runs missed the target."""
    total_score_s: float | None
    """Score by total time, with start-up and evaluations."""
    with_compile_score_s: float | None
    """Score by training time and compile time; None if nothing was compiled."""

    @property
    def record_set(self) -> RecordSet:
        """Records of the race."""
        return self.comparison.record_set

    @property
    def counted(self) -> list[RaceRun]:
        """Runs that reached the target or missed it; not those that were interrupted."""
        return [run for run in self.runs if run.is_counted]

    @property
    def misses(self) -> int:
        """Number of runs that missed the target."""
        return sum(run.outcome != "reached" for run in self.counted)

    @property
    def planned(self) -> int:
        """Number of runs that the race is to have."""
        return self.design.repeats

    @property
    def is_complete(self) -> bool:
        """Whether all runs of the race count."""
        return len(self.counted) >= self.planned and bool(events_of(self.record_set.events, EndEvent))


def race(record_set: RecordSet) -> Race:
    """Return the results of a race from its records."""
    design = record_set.designs[0]
    assert isinstance(design, RaceDesign), "the records of a race have its design"
    ordered = sorted(record_set.runs, key=lambda entry: entry.repeat)
    runs = [race_run(entry.run, entry.repeat[1] + 1, design.target_accuracy) for entry in ordered]
    counted = [run for run in runs if run.is_counted]
    return Race(
        comparison=compare(record_set),
        design=design,
        runs=runs,
        score_s=_score_by(counted, attrgetter("train_s")),
        total_score_s=_score_by(counted, attrgetter("total_s")),
        with_compile_score_s=_score_by(counted, attrgetter("with_compile_s")),
    )


def _score_by(runs: Sequence[RaceRun], time_of: Callable[[RaceRun], float | None]) -> float | None:
    """Return the score by one of the times of runs; None if it is unknown for a run that reached the target."""
    if any(time_of(run) is None for run in runs if run.outcome == "reached"):
        return None
    return score([time_of(run) for run in runs])

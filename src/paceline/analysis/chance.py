"""Accuracy at chance level: what guessing explains, and runs that have not learnt although they were trained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.records import RunRecord
from paceline.records.events import StartEvent

LEAST_STEPS, LEAST_EPOCHS = 30, 1.0
"""Training from which an accuracy at chance level means that a run has not learnt. In fewer steps, or before every
sample was seen once, it means nothing."""


@dataclass(frozen=True)
class Chance:
    """Accuracy of random guessing."""

    share: float
    """Expected accuracy."""
    most: float
    """Highest accuracy that guessing explains: three standard errors above the expected one."""


def chance_of(runs: Iterable[RunRecord]) -> Chance | None:
    """Return the accuracy of guessing on the test data of these runs; None if it is unknown or not the same."""
    runs = list(runs)
    classes = {run.topology.classes for run in runs}
    tests = [run.summary.test for run in runs if run.summary]
    samples = min((test.samples for test in tests if test and test.samples), default=0)
    known = classes.pop() if len(classes) == 1 else None
    if not known or not samples:
        return None
    share = 1 / known
    return Chance(share, share + 3 * math.sqrt(share * (1 - share) / samples))


def epochs_of(run: RunRecord) -> float | None:
    """Return the epochs that a run has trained, with fractions; None if the length of an epoch is unknown."""
    starts = run.events_of(StartEvent)
    per_epoch = starts[0].steps_per_epoch if starts else None
    return run.summary.steps / per_epoch if run.summary and per_epoch else None


def is_trained_enough(run: RunRecord) -> bool:
    """Return whether a run has trained so much that an accuracy at chance level means that it has not learnt."""
    epochs = epochs_of(run)
    steps = run.summary.steps if run.summary else 0
    return epochs is not None and epochs >= LEAST_EPOCHS and steps >= LEAST_STEPS


def is_stuck(run: RunRecord, chance: Chance | None) -> bool:
    """Return whether the accuracy of a run is at chance level although it has trained enough."""
    test = run.summary.test if run.summary else None
    if chance is None or test is None or test.accuracy is None:
        return False
    return test.accuracy <= chance.most and is_trained_enough(run)

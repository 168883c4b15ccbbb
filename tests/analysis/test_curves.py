"""Tests of the curves of a run: evaluations with the training time before them, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.analysis.curves import LearningRateCurve, learning_rate_curve, result_at, validation_curve
from paceline.records import EventWriter, RunDescription, RunFolder, RunRecord, read_run
from paceline.records.events import EvaluationEvent, LogEvent, RunEvent, StartEvent
from paceline.records.summary import EvaluationResult
from run_models import PROVENANCE, recorded_settings, topology


def run_of(folder: Path, events: Sequence[RunEvent]) -> RunRecord:
    made = RunFolder.create(folder / "run")
    made.write_run(RunDescription(config=recorded_settings(), topology=topology(), provenance=PROVENANCE))
    writer = EventWriter(made)
    for event in events:
        writer.write(event)
    writer.close()
    return read_run(made.path)


def log(step: int, steps: int, wall_s: float, lr: float | None = None, lrs: list[float] | None = None) -> LogEvent:
    losses: list[float | None] = [1.0] * steps
    return LogEvent(epoch=0, step=step, wall_s=wall_s, losses=losses, samples=steps, correct=None, lr=lr, lrs=lrs)


def evaluation(step: int | None, loss: float | None, accuracy: float | None) -> EvaluationEvent:
    result = EvaluationResult(loss=loss, accuracy=accuracy, samples=8, available=8)
    return EvaluationEvent(step=step, epoch=None if step is None else step // 4, test=result)


EVENTS: list[RunEvent] = [
    StartEvent(steps=12, steps_per_epoch=4, dropped=0),
    log(5, 5, 10.0),
    log(6, 1, 1.0),
    evaluation(6, 0.5, 0.5),
    log(10, 4, 3.0),
    evaluation(10, None, 0.75),
    log(12, 2, 2.0),
    evaluation(12, 0.25, 0.625),
]


def test_evaluations_have_the_training_time_before_them(tmp_path: Path) -> None:
    points = validation_curve(run_of(tmp_path, EVENTS))
    assert [(point.step, point.epochs, point.train_s, point.accuracy) for point in points] == [
        (6, 1.5, 11.0, 0.5),
        (10, 2.5, 14.0, 0.75),
        (12, 3.0, 16.0, 0.625),
    ]
    assert (points[0].loss, points[2].loss) == (0.5, 0.25)
    assert math.isnan(points[1].loss)


def test_the_result_at_a_time_is_that_of_the_last_evaluation_before(tmp_path: Path) -> None:
    points = validation_curve(run_of(tmp_path, EVENTS))
    found = {train_s: result_at(points, train_s) for train_s in (10.9, 11.0, 15.9, 1e9)}
    assert {train_s: point and point.step for train_s, point in found.items()} == {
        10.9: None,
        11.0: 6,
        15.9: 10,
        1e9: 12,
    }
    assert result_at([], 5.0) is None


def test_a_record_of_an_earlier_version_was_tested_at_the_end(tmp_path: Path) -> None:
    (point,) = validation_curve(run_of(tmp_path, [log(5, 5, 10.0), log(7, 2, 1.0), evaluation(None, 0.5, None)]))
    assert (point.step, point.epochs, point.train_s, point.accuracy) == (7, None, 11.0, None)


def test_a_step_has_one_point(tmp_path: Path) -> None:
    points = validation_curve(run_of(tmp_path, [*EVENTS, evaluation(12, 0.25, 0.625)]))
    assert [point.step for point in points] == [6, 10, 12]
    assert validation_curve(run_of(tmp_path / "untested", [log(5, 5, 10.0)])) == []


@pytest.mark.parametrize(
    ("lr", "lrs", "found"),
    [
        (0.3, [0.1, 0.2, 0.3], LearningRateCurve([2, 3, 4], [0.1, 0.2, 0.3])),
        (0.3, [0.3], LearningRateCurve([2, 4], [0.3, 0.3])),
        (0.3, None, LearningRateCurve([4], [0.3])),
        (None, None, LearningRateCurve([], [])),
    ],
    ids=["each", "constant", "last", "unknown"],
)
def test_learning_rates(tmp_path: Path, lr: float | None, lrs: list[float] | None, found: LearningRateCurve) -> None:
    assert learning_rate_curve(run_of(tmp_path, [log(5, 3, 1.0, lr, lrs)])) == found

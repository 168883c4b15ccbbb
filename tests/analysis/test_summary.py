"""Summaries of runs with known results."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.analysis.summary import summarise, summarise_rank
from paceline.records import RunRecord, StepRow, Steps, Summary
from run_models import PROVENANCE, recorded_settings, summary, topology

ROWS = [
    StepRow(0, 0, 10, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 1),
    StepRow(1, 0, 30, 10.0, 0.1, 0.2, 0.3, 0.4, 2.0, 15),
    StepRow(2, 0, 10, 11.0, 0.3, 0.4, 0.5, 0.8, 1.0, 9),
    StepRow(3, 0, 10, 13.0, 0.2, 0.6, 0.7, 1.5, 3.0, 5),
]


def steps_of(rows: list[StepRow]) -> Steps:
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(StepRow._fields))
    return Steps({name: table[:, index] for index, name in enumerate(StepRow._fields)})


def record_of(ranks: dict[int, list[StepRow]], summary: Summary | None = None) -> RunRecord:
    steps = {rank: steps_of(rows) for rank, rows in ranks.items()}
    return RunRecord(
        Path("run"), recorded_settings(), topology(), PROVENANCE, steps, [], summary, finished=summary is not None
    )


def test_known_results() -> None:
    summary = summarise_rank(7, steps_of(ROWS))
    assert (summary.rank, summary.steps, summary.samples) == (7, 4, 60)
    assert summary.average_loss == pytest.approx((40 + 60 + 10 + 30) / 60), "weighted by samples, not the mean of steps"
    assert summary.accuracy == pytest.approx(30 / 60)
    assert summary.first_step_s == pytest.approx(10.0)
    assert summary.step_s == pytest.approx((1.0 + 2.0 + 3.0) / 3), "without the first step"
    assert summary.median_step_s == pytest.approx(2.0)
    assert summary.data_s == pytest.approx(0.2)
    assert summary.forward_s == pytest.approx(0.4)
    assert summary.backward_s == pytest.approx(0.5)
    assert summary.update_s == pytest.approx(0.9)


def test_the_median_is_not_the_mean() -> None:
    slow = ROWS[3]._replace(update_s=100.0)
    assert summarise_rank(0, steps_of([*ROWS[:3], slow])).median_step_s == pytest.approx(2.0)


def test_a_workload_without_predictions_has_no_accuracy() -> None:
    rows = [row._replace(correct=-1) for row in ROWS]
    assert summarise_rank(0, steps_of(rows)).accuracy is None
    assert summarise_rank(0, steps_of([*ROWS[:3], rows[3]])).accuracy is None


def test_no_correct_prediction_is_an_accuracy_of_zero() -> None:
    assert summarise_rank(0, steps_of([row._replace(correct=0) for row in ROWS])).accuracy == 0.0


def test_a_diverged_run_has_no_average_loss_but_the_step_of_divergence() -> None:
    assert summarise_rank(0, steps_of(ROWS)).diverged_step is None
    lost = [ROWS[3]._replace(step=step, loss=loss) for step, loss in ((4, math.inf), (5, math.nan), (6, 1.0))]
    summary = summarise_rank(0, steps_of([*ROWS, *lost]))
    assert summary.average_loss is None
    assert summary.diverged_step == 4


def test_a_run_of_one_step_has_only_the_time_of_the_first() -> None:
    summary = summarise_rank(0, steps_of(ROWS[:1]))
    assert (summary.steps, summary.samples, summary.average_loss, summary.accuracy) == (1, 10, 4.0, 0.1)
    assert summary.first_step_s == pytest.approx(10.0)
    assert (summary.step_s, summary.median_step_s) == (None, None)
    assert (summary.data_s, summary.forward_s, summary.backward_s, summary.update_s) == (None,) * 4


def test_a_run_without_steps_has_no_values() -> None:
    values = msgspec.structs.asdict(summarise_rank(2, steps_of([])))
    assert (values.pop("rank"), values.pop("steps"), values.pop("samples")) == (2, 0, 0)
    assert len(values) == 14
    assert set(values.values()) == {None}


def test_the_written_summary_is_used() -> None:
    written = summary(steps=99)
    assert summarise(record_of({0: ROWS}, written)) is written


def test_an_interrupted_run_is_summarised_from_its_steps() -> None:
    found = summarise(record_of({10: ROWS[:2], 2: ROWS, 0: ROWS[:3]}))
    assert [rank.rank for rank in found.ranks] == [0, 2, 10]
    assert found.ranks[1] == summarise_rank(2, steps_of(ROWS))
    assert found.steps == 2, "the steps that all ranks have done"
    assert (found.train_s, found.traffic, found.test) == (None, None, None)


def test_a_run_interrupted_before_its_first_step() -> None:
    found = summarise(record_of({}))
    assert (found.ranks, found.steps) == ([], 0)

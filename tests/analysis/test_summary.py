"""Summaries of runs with known results."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.analysis.steps.timing import WindowTime, counted_steps
from paceline.analysis.summary import RankTotals, summarise, summarise_rank
from paceline.records import RunRecord, StepRow, Steps, Summary
from run_models import PROVENANCE, recorded_settings, summary, topology

ROWS = [
    StepRow(0, 0, 10, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 1),
    StepRow(1, 0, 30, 10.0, 0.1, 0.2, 0.3, 0.4, 2.0, 15),
    StepRow(2, 0, 10, 11.0, 0.3, 0.4, 0.5, 0.8, 1.0, 9),
    StepRow(3, 0, 10, 13.0, 0.2, 0.6, 0.7, 1.5, 3.0, 5),
]


def record_of(ranks: dict[int, list[StepRow]], summary: Summary | None = None) -> RunRecord:
    steps = {rank: Steps.of(rows) for rank, rows in ranks.items()}
    return RunRecord(
        Path("run"), recorded_settings(), topology(), PROVENANCE, steps, [], summary, finished=summary is not None
    )


def test_known_results() -> None:
    summary = summarise_rank(7, Steps.of(ROWS))
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
    assert summarise_rank(0, Steps.of([*ROWS[:3], slow])).median_step_s == pytest.approx(2.0)


def test_a_workload_without_predictions_has_no_accuracy() -> None:
    rows = [row._replace(correct=-1) for row in ROWS]
    assert summarise_rank(0, Steps.of(rows)).accuracy is None
    assert summarise_rank(0, Steps.of([*ROWS[:3], rows[3]])).accuracy is None


def test_no_correct_prediction_is_an_accuracy_of_zero() -> None:
    assert summarise_rank(0, Steps.of([row._replace(correct=0) for row in ROWS])).accuracy == 0.0


def test_a_diverged_run_has_no_average_loss_but_the_step_of_divergence() -> None:
    assert summarise_rank(0, Steps.of(ROWS)).diverged_step is None
    lost = [ROWS[3]._replace(step=step, loss=loss) for step, loss in ((4, math.inf), (5, math.nan), (6, 1.0))]
    summary = summarise_rank(0, Steps.of([*ROWS, *lost]))
    assert summary.average_loss is None
    assert summary.diverged_step == 4


def test_a_run_of_one_step_has_only_the_time_of_the_first() -> None:
    summary = summarise_rank(0, Steps.of(ROWS[:1]))
    assert (summary.steps, summary.samples, summary.average_loss, summary.accuracy) == (1, 10, 4.0, 0.1)
    assert summary.first_step_s == pytest.approx(10.0)
    assert (summary.step_s, summary.median_step_s) == (None, None)
    assert (summary.data_s, summary.forward_s, summary.backward_s, summary.update_s) == (None,) * 4


def test_a_run_without_steps_has_no_values() -> None:
    values = msgspec.structs.asdict(summarise_rank(2, Steps.of([])))
    assert (values.pop("rank"), values.pop("steps"), values.pop("samples")) == (2, 0, 0)
    assert values.pop("skipped_samples") == 0
    assert len(values) == 17
    assert set(values.values()) == {None}


def test_skipped_steps_are_left_out_of_losses_and_accuracy() -> None:
    rows = [row._replace(loss=math.nan, correct=0) if row.step in (1, 3) else row for row in ROWS]
    summary = summarise_rank(0, Steps.of(rows), skipped={1, 3})
    trained = [row for row in rows if row.step not in (1, 3)]
    samples = sum(row.samples for row in trained)
    assert summary.average_loss == pytest.approx(sum(row.loss * row.samples for row in trained if row.loss) / samples)
    assert summary.accuracy == pytest.approx(sum(row.correct for row in trained) / samples)
    assert summary.diverged_step is None
    assert (summary.samples, summary.skipped_samples) == (
        sum(row.samples for row in rows),
        sum(r.samples for r in rows) - samples,
    )
    assert summarise_rank(0, Steps.of(rows), skipped={1}).diverged_step == 3


def rows_of(count: int) -> list[StepRow]:
    random = np.random.default_rng(3)
    return [StepRow(step, 0, 8, step, *random.exponential(size=4), random.normal(), step % 8) for step in range(count)]


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_steps_added_window_by_window_have_the_same_summary(count: int, length: int) -> None:
    """The times of the second and of the fifth window do not count."""
    rows = rows_of(count)
    spans = [rows[start : start + length] for start in range(0, count, length)]
    profiled, totals = [number in (1, 4) for number in range(len(spans))], RankTotals()
    for span, is_profiled in zip(spans, profiled, strict=True):
        totals.add(Steps.of(span), profiled=is_profiled)
    windows = [WindowTime(len(span), 1.0, is_profiled) for span, is_profiled in zip(spans, profiled, strict=True)]
    for name, value in msgspec.structs.asdict(summarise_rank(3, Steps.of(rows), windows)).items():
        assert getattr(totals.summary(3), name) == (value if value is None else pytest.approx(value)), name
    counted = [row.total_s for row, counts in zip(rows, counted_steps(windows, count), strict=True) if counts]
    assert totals.summary(3).step_s == (pytest.approx(np.mean(counted)) if counted else None)
    assert totals.summary(3).median_step_s == (pytest.approx(np.median(counted)) if counted else None)
    assert totals.span_s == (0, pytest.approx(rows[-1].start_s + rows[-1].total_s))


def test_totals_of_a_long_run_need_no_more_memory_than_those_of_a_shorter_one() -> None:
    window, totals, sizes = Steps.of(rows_of(1000)), RankTotals(), []
    for _ in range(3):
        for _ in range(70):
            totals.add(window)
        sizes.append(len(pickle.dumps(totals)))
    assert totals.summary(0).steps == 210_000
    assert max(sizes) - min(sizes) < 100


def test_totals_of_a_loss_that_diverges_or_is_not_reported() -> None:
    totals = RankTotals()
    for loss in (1.0, math.inf, -math.inf, math.nan):
        totals.add(Steps.of([ROWS[0]._replace(loss=loss)]))
    totals.add(Steps.of([]))
    assert (totals.summary(0).average_loss, totals.summary(0).diverged_step) == (None, 0)
    totals.add(Steps.of([ROWS[1]._replace(loss=None)]))
    assert (totals.summary(0).average_loss, totals.summary(0).diverged_step) == (None, None)


def test_the_written_summary_is_used() -> None:
    written = summary(steps=99)
    assert summarise(record_of({0: ROWS}, written)) is written


def test_an_interrupted_run_is_summarised_from_its_steps() -> None:
    found = summarise(record_of({10: ROWS[:2], 2: ROWS, 0: ROWS[:3]}))
    assert [rank.rank for rank in found.ranks] == [0, 2, 10]
    assert found.ranks[1] == summarise_rank(2, Steps.of(ROWS))
    assert found.steps == 2, "the steps that all ranks have done"
    assert (found.train_s, found.traffic, found.test) == (None, None, None)


def test_a_run_interrupted_before_its_first_step() -> None:
    found = summarise(record_of({}))
    assert (found.ranks, found.steps) == ([], 0)

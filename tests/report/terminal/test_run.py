"""Tests of the terminal summary of a run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as change
from rich.console import Console

from experiments_on_disk import CLASSIC, write_experiment
from paceline.analysis.summary import summarise, summarise_rank
from paceline.records import RunRecord, read_run
from paceline.records.summary import BestEvaluation, Divergence, EpochEstimate, EvaluationResult
from paceline.report.terminal.run import print_run, sentences
from run_models import PROVENANCE, rank_summary, recorded_settings, replicas, summary, topology

DIVERGENCE = Divergence(step=17, loss=None, before=45.2)


def said(*, changes: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **results: Any) -> str:
    """Return the sentences on a run of two ranks; `changes` are those to its topology."""
    whole = summary(steps=40, train_s=0.4, samples_per_s=6400.0, **results)
    about = (recorded_settings(bn="local", **(settings or {})), topology(**(changes or {})), PROVENANCE)
    return said_of(RunRecord(Path("runs/x"), *about, {}, [], whole, finished=True))


def said_of(record: RunRecord) -> str:
    return "\n".join(sentences(summarise(record), record))


def test_the_plain_end() -> None:
    assert said() == "trained 40 steps in 400.00 ms, 6,400 samples/s in the median window\nrecord: runs/x"


def test_the_test_says_how_many_samples_it_counted() -> None:
    test = EvaluationResult(loss=0.25, accuracy=0.5, samples=9999, available=10000)
    assert "test loss 0.2500, accuracy 50.0%: evaluated 9999/10000 unique samples" in said(test=test)
    assert "evaluated 9999 unique samples" in said(test=change(test, available=None, accuracy=None))


def test_the_best_evaluation_is_reported_unless_it_is_the_last() -> None:
    test = EvaluationResult(loss=0.5, accuracy=0.875, samples=8, available=8)
    best = BestEvaluation(step=8, epoch=1, loss=0.25, accuracy=0.9)
    assert "best accuracy 90.0%, at test loss 0.2500: after step 8 (epoch 2)" in said(test=test, best=best)
    assert "lowest test loss 0.2500: after step 8\n" in said(test=test, best=change(best, epoch=None, accuracy=None))
    assert "best" not in said(test=test, best=change(best, step=40))


def test_a_test_loss_that_is_not_finite() -> None:
    test = EvaluationResult(loss=None, accuracy=None, samples=400, available=400)
    assert "the test loss is not finite: the test data" in said(test=test)
    assert "not finite" not in said(test=change(test, samples=0))


def test_buffers() -> None:
    assert "BatchNorm" not in said(buffer_divergence=None)
    assert "BatchNorm buffers (--bn local): identical on all ranks" in said(buffer_divergence=0.0)
    assert "differ by 1.250% of their norm" in said(buffer_divergence=0.0125)


def test_replicas() -> None:
    assert "replicas" not in said(replicas=None)
    cost = "in 6 checks (1.90 ms, 0.04% of the training time)"
    assert f"replicas: identical on all ranks {cost}" in said(replicas=replicas(difference=None))
    assert f"replicas: equal on all ranks up to rounding {cost}" in said(replicas=replicas())
    difference = replicas().difference
    assert difference is not None
    large = replicas(difference=change(difference, by_rounding=False), share=None)
    assert "replicas: not equal on all ranks in 6 checks (1.90 ms)" in said(replicas=large)


@pytest.mark.parametrize(
    ("slower", "exchanges", "flagged"), [(1.04, True, False), (1.06, True, True), (2, False, False)]
)
def test_ranks_of_a_synchronous_run_take_the_same_time(slower: float, exchanges: bool, flagged: bool) -> None:
    ranks = [rank_summary(r, step_s=0.01 * factor) for r, factor in ((0, 1), (1, slower))]
    assert ("step times differ by" in said(ranks=ranks, changes={"exchanges": exchanges})) == flagged


def test_uneven_ranks_are_reported_with_their_cores() -> None:
    ranks = [rank_summary(r, step_s=step_s) for r, step_s in ((0, 0.01), (1, 0.012))]
    sentence = (
        "step times differ by 20.0% between ranks, although they step together; "
        "ranks probably share cores with each other or with other programs (2 ranks on 2 cores)"
    )
    assert sentence in said(ranks=ranks)
    assert "(2 ranks on 1 core)" in said(ranks=ranks, changes={"cores": 1.0})
    assert "share cores" not in said(ranks=ranks, changes={"device": "cuda:0"})


def test_divergence_is_reported_with_step_seed_and_loss() -> None:
    cause = "the loss is not finite; the last finite one was 45.2"
    assert f"the run diverged at step 17 (seed 0): {cause}\n" in said(divergence=DIVERGENCE)


def test_the_record_of_a_run_that_diverged_is_not_called_interrupted(tmp_path: Path) -> None:
    record = a_run(tmp_path)
    assert "(interrupted)" in said_of(replace(record, finished=False))
    whole = summary(divergence=DIVERGENCE)
    text = said_of(replace(record, finished=False, summary=whole))
    assert text.endswith("(stopped)")
    assert "hint:" not in text, "the error that stopped it has one"


def test_skipped_steps_are_counted() -> None:
    assert "skipped" not in said()
    assert "skipped the update of 3 steps because gradients were not finite" in said(skipped_steps=3)
    overflow = said(skipped_steps=3, settings={"precision": "fp16"})
    assert "skipped the update of 3 steps because gradients were not finite" in overflow


def test_divergence_on_batches_of_an_iterable_may_come_from_the_data() -> None:
    rest = "use a lower --lr, a longer --warmup-epochs or --clip-norm 1"
    assert f"hint: {rest}" in said(divergence=DIVERGENCE), "the data set was examined"
    assert f"hint: check the data for NaN, or {rest}" in said(divergence=DIVERGENCE, changes={"batch": None})


def test_the_estimate() -> None:
    assert "10 epochs would take about 2.1 min" in said(estimate=EpochEstimate(epochs=10, seconds=126.0))


def a_run(path: Path, *, steps: int = 12, ranks: int = 2) -> RunRecord:
    """Return a run under ddp with events and without a summary, so that figures are computed from its steps."""
    write_experiment(path / "e", CLASSIC[3:], repeats=1, ranks=ranks, steps=steps, events=True)
    return replace(read_run(path / "e" / "repeat-1" / "1"), summary=None)


def printed(record: RunRecord, width: int) -> list[str]:
    stream = io.StringIO()
    print_run(record, Console(file=stream, width=width, color_system=None))
    return stream.getvalue().splitlines()


def split_lines(lines: list[str]) -> list[str]:
    (title,) = [number for number, line in enumerate(lines) if line.strip() == "time split of the mean step"]
    return lines[title + 1 : title + 4]


@pytest.mark.parametrize("width", [80, 99, 100, 140])
def test_the_time_split_fits_the_screen(tmp_path: Path, width: int) -> None:
    heading, *ranks = split_lines(printed(a_run(tmp_path), width))
    assert heading.split() == [
        "rank",
        "compute",
        "overlapped",
        "exposed",
        "other",
        "(data)",
        "(descheduled)",
        "overlap",
    ]
    assert all(len(line) <= width for line in (heading, *ranks))
    if width < 100:
        assert ranks[0].split() == ["0", "68%", "10%", "20%", "2%", "2%", "8%", "33%"]
    else:
        assert ranks[0].split()[:4] == ["0", "6.80", "ms", "68%"]


def test_both_tables_are_of_the_same_steps(tmp_path: Path) -> None:
    record = a_run(tmp_path)
    rows = record.steps[0]
    slow = replace(rows, columns=rows.columns | {"update_s": np.array([1.0] * 5 + [0.002] * 7)})
    assert summarise_rank(0, slow).update_s == pytest.approx(0.002), "warm-up steps do not count"
    heading = printed(record, 140)[0]
    assert "mean time/step" in heading


@pytest.mark.parametrize(("steps", "said"), [(1, True), (5, True), (6, False)])
def test_a_short_run_says_that_the_warm_up_counts(tmp_path: Path, steps: int, said: bool) -> None:
    lines = printed(a_run(tmp_path, steps=steps), 140)
    assert ("warm-up steps included: fewer than 6 steps" in lines) == said


def test_one_rank_has_no_overlap(tmp_path: Path) -> None:
    heading, rank, *_ = split_lines(printed(a_run(tmp_path, ranks=1), 80))
    assert heading.split()[-1] == "(descheduled)", "a column without any value is left out"
    assert rank.split() == ["0", "78%", "0%", "0%", "22%", "2%", "8%"]

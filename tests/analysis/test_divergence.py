"""Divergence of a run: losses that are not finite, growth that lasts, and healthy training that must not be named."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments_on_disk import CLASSIC, falling, read_comparison, write_experiment
from paceline.analysis.divergence import MOST_SKIPPED, DivergenceDetector, divergence_cause, divergence_of
from paceline.records import read_run
from paceline.records.experiment.design import Candidate
from paceline.records.summary import Divergence
from paceline.report.figures.candidates import candidate_csv, candidate_json
from paceline.report.verdict.sentences import sentences


def found(losses: Sequence[float], skipped: Collection[int] = ()) -> Divergence | None:
    """Return the divergence of a run, which does not depend on how its losses are cut into windows."""
    results = []
    for window in (1, 7, len(losses)):
        detector = DivergenceDetector()
        for start in range(0, len(losses), window):
            detector.add(losses[start : start + window], skipped)
        results.append(detector.found)
    assert results[0] == results[1] == results[2]
    return results[0]


def test_a_loss_that_is_not_finite() -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert found([2.0, 3.5, value, 1.0]) == Divergence(step=2, loss=None, before=3.5)
    assert found([math.nan, 1.0]) == Divergence(step=0, loss=None, before=None)


def test_a_skipped_step_is_none() -> None:
    assert found([2.0, math.nan, 1.9, math.inf, 1.8], skipped={1, 3}) is None
    assert found([2.0, math.nan, math.nan], skipped={1}) == Divergence(step=2, loss=None, before=2.0)


def test_many_skipped_steps_in_a_row_are_a_divergence() -> None:
    losses = [2.0] * 3 + [math.nan] * MOST_SKIPPED
    skipped = range(3, 3 + MOST_SKIPPED)
    assert found(losses, skipped) == Divergence(step=3, loss=None, before=2.0, skipped=MOST_SKIPPED)
    assert found(losses[:-1], skipped) is None
    assert found([*losses[:-1], 2.0], skipped[:-1]) is None
    scattered = [step for step in range(200) if step % 10]
    assert found([2.0] * 200, scattered) is None


def test_growth_that_lasts_until_the_end() -> None:
    losses = [2.3, 2.4, 2.2, 2.5, 2.3, 2.6, 24.0, 30.0, *[26.0] * 10]
    assert found(losses) == Divergence(step=7, loss=30.0, before=2.5)
    assert found([*losses, 2.4]) is None, "it has recovered"
    assert found([2.3] * 5 + [26.0] * 9) is None, "too short to judge"
    assert found([*[2.3] * 200, *[26.0] * 20]) is None, "it lasts for less than a tenth of the run"
    assert found([*[2.3] * 200, *[26.0] * 23]) == Divergence(step=200, loss=26.0, before=2.3)
    assert found([-2.0] * 20 + [5.0] * 30) is None, "a loss that starts below 0 has no ratio"
    assert found([0.0] * 20 + [5.0] * 30) is None


@pytest.mark.parametrize("steps", [15, 40, 400])
def test_healthy_training_is_never_named(steps: int) -> None:
    """Losses that fall, or do not, with the noise of small batches, spikes, and a rise under a high learning rate."""
    random = np.random.default_rng(0)
    for run in range(300):
        start = 10 ** random.uniform(-3, 3)
        trend = start * np.exp(-np.arange(steps) / steps * random.uniform(0, 5))
        trend *= 1 + random.uniform(0, 3) * np.exp(-((np.arange(steps) - steps / 4) ** 2) / steps)
        losses = trend * random.lognormal(0, 0.7, steps)
        spikes = random.integers(0, steps, steps // 20)
        losses[spikes] *= 100
        assert found(losses.tolist()) is None, run


def test_the_clause_names_the_losses() -> None:
    assert divergence_cause(Divergence(step=3, loss=None, before=1e30)) == (
        "the loss is not finite; the last finite one was 1e+30"
    )
    assert divergence_cause(Divergence(step=0, loss=None, before=None)) == "the loss is not finite"
    assert divergence_cause(Divergence(step=7, loss=30.0, before=2.5)) == (
        "from there on the loss is more than 10 times that of the first steps (2.5)"
    )


# In a comparison.


def growing(candidate: Candidate, repeat: int, step: int) -> float:
    """Return losses of which those of `allreduce` grow in the second repeat, and those of `ddp` become NaN."""
    if repeat == 1 and step >= 8 and candidate.name in ("allreduce", "ddp"):
        return 500.0 if candidate.name == "allreduce" else math.nan
    return falling(candidate, repeat, step)


@pytest.fixture(scope="module")
def diverging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an experiment of three repeats; diverged runs have an accuracy and an average loss of their own."""
    path = write_experiment(tmp_path_factory.mktemp("diverging") / "e", repeats=3, steps=30, losses=growing)
    for place in (3, 4):
        file = path / "repeat-2" / str(place) / "summary.json"
        summary = json.loads(file.read_text())
        summary["average_loss"] = summary["test"]["loss"] = 777.0
        summary["test"]["accuracy"] = 0.1
        file.write_text(json.dumps(summary))
    return path


@pytest.mark.parametrize("name", ["allreduce", "ddp"])
def test_diverged_runs_are_left_out_of_losses_and_accuracies(diverging: Path, name: str) -> None:
    comparison = read_comparison(diverging)
    row = comparison.row(name)
    assert row.train_loss is not None
    assert row.test_loss is not None
    assert row.test_accuracy is not None
    assert (row.train_loss.repeats, row.test_loss.repeats, row.test_accuracy.repeats) == (2, 2, 2)
    assert max(row.train_loss.value, row.test_loss.value) < 3
    assert row.test_accuracy.value == 0.5
    assert row.step_s is not None
    assert row.step_s.repeats == 3, "its times count"
    assert row.accuracy_gain is None, "two seeds are left, too few for a spread"
    assert all(rank.average_loss is not None and rank.average_loss < 3 for rank in row.ranks)
    assert [(one.seed, one.divergence.step) for one in row.diverged] == [(1, 8)]
    assert candidate_csv(row)["diverged"] == "step 8 (seed 1)"
    (said,) = candidate_json(row)["diverged"]
    loss = 500.0 if name == "allreduce" else None
    assert (said["seed"], said["step"], said["loss"]) == (1, 8, loss)
    assert not any("accuracy is" in sentence for sentence in sentences(comparison))


def test_losses_are_compared_in_a_repeat_without_divergence(tmp_path: Path) -> None:
    def first(candidate: Candidate, repeat: int, _: int) -> float:
        return math.nan if candidate.name == "allreduce" and repeat == 0 else 2.0 + 1e-6 * (candidate.name == "ddp")

    differences = {
        one.candidate: one for one in read_comparison(write_experiment(tmp_path / "e", losses=first)).loss_differences
    }
    assert differences["allreduce"].last_difference == pytest.approx(5e-7, rel=0.1)


def test_without_such_a_repeat_losses_are_not_compared(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", CLASSIC[2:], losses=lambda *_: math.nan))
    assert comparison.loss_differences == []


def test_an_interrupted_record_has_its_divergence(diverging: Path) -> None:
    run = read_run(diverging / "repeat-2" / "4")
    divergence = divergence_of(run)
    assert divergence is not None
    assert (divergence.step, divergence.loss) == (8, None)
    assert divergence_of(read_run(diverging / "repeat-1" / "4")) is None


def test_skipped_steps_are_counted_and_no_divergence(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return math.nan if candidate.name == "ddp" and step in (3, 7) else falling(candidate, repeat, step)

    comparison = read_comparison(write_experiment(tmp_path / "e", losses=losses, skipped={"ddp": (3, 7)}))
    row = comparison.row("ddp")
    assert (row.diverged, row.skipped_steps) == ([], 4)
    assert comparison.row("allreduce").skipped_steps is None
    assert not [warning for warning in comparison.warnings if "diverged" in warning]


def test_a_loss_that_explodes_is_divergence_even_if_it_falls_again() -> None:
    detector = DivergenceDetector()
    detector.add([2.3, 133.0, 7e8, 1e23, 5e27, *[4.0] * 40])
    found = detector.found
    assert found is not None
    assert (found.step, found.loss, found.before) == (2, 7e8, 2.3)
    assert divergence_cause(found) == "the loss is 7e+08, more than 1,000,000 times the first one (2.3)"
    spike = DivergenceDetector()
    spike.add([2.3, 2.2, 90_000.0, *[2.0] * 40])
    assert spike.found is None

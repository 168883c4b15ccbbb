"""Accuracy at chance level: too few steps, or runs that have not learnt."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments_on_disk import read_comparison, write_experiment
from paceline.report.verdict.sentences import sentences

AT_CHANCE = "All test accuracies are at chance level (10%)"


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (12, ": too few steps were trained to compare them. Train longer with --steps or --epochs."),
        (29, ": too few steps were trained"),
        (40, " after 8 epochs: the learning rate is probably too high or too low. Try another --lr"),
    ],
)
def test_accuracies_at_chance_level_have_a_reason(tmp_path: Path, steps: int, reason: str) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", steps=steps, accuracy=0.11))
    assert AT_CHANCE + reason in " ".join(sentences(comparison))
    assert not [warning for warning in comparison.warnings if "chance" in warning]


def test_single_runs_that_have_not_learnt_are_named(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=3, steps=40)
    for place in (3, 4):  # allreduce and ddp
        file = path / "repeat-2" / str(place) / "summary.json"
        file.write_text(
            file.read_text().replace('"accuracy": 0.5,\n    "samples": 360', '"accuracy": 0.1,\n    "samples": 360')
        )
    comparison = read_comparison(path)
    assert not any("chance" in sentence for sentence in sentences(comparison))
    (warning,) = [warning for warning in comparison.warnings if "chance" in warning]
    assert warning == (
        "allreduce and ddp: the test accuracy is at chance level (10%) after 8 epochs in 1 of 3 repeats (seed 1). The "
        "learning rate is probably too high or too low for these runs; their accuracies are part of the figures."
    )

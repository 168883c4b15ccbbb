"""Tests of the sentences on a race."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.analysis.race.race import race
from paceline.analysis.record_set import collect_records
from paceline.records.experiment.record import read_experiment
from paceline.report.race_verdict import format_run, headline, sentences
from races_on_disk import FLAT, RISING, write_race


@pytest.mark.parametrize(
    ("windows_s", "accuracies", "sentence"),
    [
        (
            [0.1],
            [RISING],
            "90% in 0.30 s of training, 5.80 s in total: each is the time of the only run; from 3 runs on, the fastest "
            "and the slowest are left out.",
        ),
        (
            [1.0, 2.0],
            [RISING] * 2,
            "90% in 4.50 s of training, 10.00 s in total: each is the mean of 2 runs; from 3 runs on, the fastest and "
            "the slowest are left out.",
        ),
        (
            [1.0, 60.0, 2.0],
            [RISING] * 3,
            "90% in 6.00 s of training, 11.50 s in total: each is the middle one of 3 runs, without the fastest and "
            "the slowest.",
        ),
        (
            [1.0, 60.0, 2.0, 100.0],
            [RISING] * 4,
            "90% in 93.00 s of training, 98.50 s in total: each is the mean of 2 of 4 runs, without the fastest and "
            "the slowest.",
        ),
        (
            [1.0, 60.0, 2.0],
            [RISING, FLAT, RISING],
            "90% in 6.00 s of training, 11.50 s in total: each is the slower of the 2 runs that reached it; the other "
            "missed, and counts as the slowest.",
        ),
        (
            [1.0, 60.0, 2.0, 3.0],
            [RISING, FLAT, RISING, RISING],
            "90% in 7.50 s of training, 13.00 s in total: each is the mean of 2 of 4 runs, without the fastest and the "
            "one that missed, which counts as the slowest.",
        ),
        ([1.0, 2.0], [RISING, FLAT], "No score: 1 of 2 runs missed the target of 90%."),
    ],
    ids=str,
)
def test_the_headline_has_times_in_seconds_and_says_which_runs_they_are_from(
    tmp_path: Path, windows_s: list[float], accuracies: list[tuple[float, ...]], sentence: str
) -> None:
    path = write_race(tmp_path / "race", windows_s, accuracies)
    assert headline(race(collect_records([read_experiment(path)]))) == sentence


def test_a_miss_has_its_best_accuracy_and_the_time_that_it_trained(tmp_path: Path) -> None:
    found = race(collect_records([read_experiment(write_race(tmp_path / "race", [2.0], [FLAT]))]))
    assert format_run(found.runs[0], 0.9) == "missed, best accuracy 70%, 6.00 s of training"


def test_the_longest_parts_of_the_start_up_are_named(tmp_path: Path) -> None:
    parts = {"starting processes": 0.25, "importing torch": 2.0, "connecting ranks": 0.1, "making the workload": 1.0}
    found = race(collect_records([read_experiment(write_race(tmp_path / "race", [2.0], start_up_parts_s=parts))]))
    assert list(sentences(found))[1] == (
        "The start-up took 4.00 s on average; its longest parts: importing torch 2.00 s, making the workload 1.00 s, "
        "starting processes 0.25 s."
    )

"""Times of the runs of a race, from records whose times are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.analysis.other_load import OtherLoad
from paceline.analysis.race.race import Race, race
from paceline.analysis.record_set import collect_records
from paceline.records.experiment.record import read_experiment
from races_on_disk import FLAT, RISING, write_race


def race_in(path: Path) -> Race:
    return race(collect_records([read_experiment(path)]))


def test_training_time_leaves_out_evaluations_and_start_up_which_the_total_time_includes(tmp_path: Path) -> None:
    found = race_in(write_race(tmp_path / "race", [2.0], compile_s=1.5))
    (run,) = found.runs
    assert run.outcome == "reached"
    assert run.train_s == pytest.approx(3 * 2.0)
    assert run.evaluation_s == pytest.approx(3 * 0.5)
    assert run.evaluations == 3
    assert run.start_up_s == 4.0
    assert run.total_s == pytest.approx(4.0 + 3 * 2.5)
    assert run.with_compile_s == pytest.approx(6.0 + 1.5)
    assert (run.step, run.epochs, run.accuracy) == (30, 3.0, 0.95)


def test_times_are_those_of_the_first_evaluation_at_the_target(tmp_path: Path) -> None:
    found = race_in(write_race(tmp_path / "race", [2.0], [(0.5, 0.9, 0.99)]))  # Exactly the target counts.
    (run,) = found.runs
    assert (run.step, run.evaluations, run.accuracy) == (20, 2, 0.9)
    assert run.train_s == pytest.approx(4.0)
    assert run.evaluation_s == pytest.approx(1.0)
    assert run.total_s == pytest.approx(4.0 + 5.0)
    assert run.with_compile_s is None, "nothing was compiled"


def test_scores_by_training_time_and_by_total_time(tmp_path: Path) -> None:
    found = race_in(write_race(tmp_path / "race", [1.0, 9.0, 2.0, 3.0]))
    assert found.score_s == pytest.approx((6.0 + 9.0) / 2)
    assert found.total_score_s == pytest.approx((6.0 + 9.0) / 2 + 4.0 + 1.5)
    assert found.is_complete
    assert not found.misses


def test_a_miss_counts_as_the_slowest_and_two_give_no_score(tmp_path: Path) -> None:
    one = race_in(write_race(tmp_path / "one", [1.0, 2.0, 3.0], [RISING, FLAT, RISING]))
    assert one.misses == 1
    assert one.runs[1].train_s is None
    assert one.runs[1].accuracy == 0.7, "its best"
    assert one.score_s == pytest.approx(9.0)
    two = race_in(write_race(tmp_path / "two", [1.0, 2.0, 3.0], [RISING, FLAT, FLAT]))
    assert (two.misses, two.score_s) == (2, None)


def test_other_programs_make_times_longer_and_no_interval_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = OtherLoad(least=0.5, most=1.0, cores=2, runs=1, explained=None)
    monkeypatch.setattr("paceline.analysis.caveats.other_load", lambda _: load)
    assert race_in(write_race(tmp_path / "race", [1.0])).comparison.warnings == [
        "Other programs used 0.5–1.0 of 2 cores during the runs, which makes times longer. Repeat on a quiet machine "
        "before comparing them with other races."
    ]


def test_a_run_that_was_interrupted_does_not_count(tmp_path: Path) -> None:
    found = race_in(write_race(tmp_path / "race", [1.0, 2.0], [RISING, FLAT], planned=3, interrupted=True))
    assert [run.outcome for run in found.runs] == ["reached", "unfinished"]
    assert found.score_s == pytest.approx(3.0)
    assert not found.misses
    assert not found.is_complete

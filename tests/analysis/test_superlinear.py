"""Speed-ups over one process that exceed the number of ranks, beside other programs and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, read_comparison, write_experiment, write_load
from paceline.analysis.comparison import Comparison
from paceline.analysis.superlinear import BY_CACHES

NOISE = 1.02
"""Largest factor between the step times of repeats."""


def comparison(path: Path, speed_ups: dict[str, float], load: float | None = None, **written: Any) -> Comparison:
    """Return a comparison on two ranks of two cores; their steps have twice the samples of those of one process."""
    step_s = {"single": 0.04} | {name: 0.08 / speed_up for name, speed_up in speed_ups.items()}
    candidates = [candidate for candidate in CLASSIC if candidate.name in step_s]
    out = write_experiment(path / "e", candidates, step_s=step_s, **{"repeats": 4} | written)
    return read_comparison(out if load is None else write_load(out, load))


def notes(found: Comparison) -> list[str]:
    return [warning for warning in found.warnings if "the speed-up over" in warning]


@pytest.mark.parametrize("repeats", [1, 4])
def test_beside_other_programs_an_impossible_speed_up_is_no_result(tmp_path: Path, repeats: int) -> None:
    found = comparison(tmp_path, {"ddp": 9.0, "allreduce": 5.0}, load=1.3, repeats=repeats)
    assert found.gain_in_doubt
    (note,) = notes(found)
    assert note.startswith("ddp (")
    assert " and allreduce (" in note
    assert "): the speed-up over single is more than 2 ranks can gain. Other programs used 1.3 of 2 cores " in note
    assert note.endswith("Repeat on a quiet machine to measure the speed-up."), "each process has one thread"


def test_threads_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s={"single": 0.4}, repeats=4)
    for run in path.glob("repeat-*/1/run.json"):
        text = run.read_text()
        assert '"threads": 1' in text
        run.write_text(text.replace('"threads": 1', '"threads": 2'))
    (note,) = notes(read_comparison(write_load(path, 1.0)))
    assert "slowed single down more than the ranks: its 2 threads wait for each other." in note
    assert note.endswith("Repeat on a quiet machine, or with --threads 1, to measure the speed-up.")


@pytest.mark.parametrize("load", [None, 0.02])
def test_without_other_programs_it_is_pointed_out(tmp_path: Path, load: float | None) -> None:
    found = comparison(tmp_path, {"ddp": 4.0, "allreduce": 1.5}, load=load)
    assert not found.gain_in_doubt
    (note,) = notes(found)
    assert note.startswith("ddp (")
    assert "exceeds the number of ranks, 2; smaller shares of the batch may fit into a cache" in note
    assert "something that was not measured slowed single down" in note


def test_a_little_above_the_number_of_ranks_may_be_caches(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"ddp": 2 * BY_CACHES / NOISE**2}, load=1.3)
    assert not found.gain_in_doubt
    (note,) = notes(found)
    assert "may fit into a cache or be allocated faster, or other programs slowed single down" in note


@pytest.mark.parametrize("load", [None, 1.3])
def test_up_to_the_number_of_ranks_nothing_is_said(tmp_path: Path, load: float | None) -> None:
    found = comparison(tmp_path, {"ddp": 2.0, "allreduce": 1.2}, load=load)
    assert not found.gain_in_doubt
    assert notes(found) == []

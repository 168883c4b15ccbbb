"""Record sets: unique names of candidates, and pairs only of runs that were measured together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.analysis.comparison import Comparison, compare
from paceline.analysis.record_set import collect_records
from paceline.config import RunConfig
from paceline.records.experiment.design import Candidate
from paceline.records.experiment.record import read_experiment
from paceline.records.find import find_records
from paceline.report.page.comparison import render
from paceline.workloads.recipes import choose_recipe

STEP_S = {"single": 0.04, "none": 0.01, "allreduce": 0.03, "ddp": 0.02}


def compared(*paths: Path) -> Comparison:
    return compare(collect_records([read_experiment(path) for path in paths]))


def compared_separately(path: Path) -> Comparison:
    """Compare the runs of an experiment as if `paceline train` had started each separately."""
    return compare(collect_records(*find_records(sorted(path.glob("repeat-*")))))


def change(path: Path, files: str, edit: Callable[[dict[str, Any]], object]) -> None:
    for file in path.rglob(files):
        content = json.loads(file.read_text())
        edit(content)
        file.write_text(json.dumps(content))


def test_a_name_is_numbered_until_it_is_unique(tmp_path: Path) -> None:
    same = [Candidate("ddp", "ddp"), Candidate("ddp (2)", "ddp")]
    comparison = compared(
        write_experiment(tmp_path / "aa", same, repeats=2), write_experiment(tmp_path / "b", same[:1], repeats=3)
    )
    assert {row.candidate.name: row.repeats for row in comparison.rows} == {"ddp": 2, "ddp (2)": 2, "ddp (3)": 3}


def test_a_name_that_looks_numbered_stays_unique(tmp_path: Path) -> None:
    paths = [
        write_experiment(tmp_path / "b", [Candidate("ddp", "ddp")]),
        write_experiment(tmp_path / "aa", [Candidate("ddp", "ddp"), Candidate("ddp (2)", "ddp")]),
    ]
    names = [row.candidate.name for row in compared(*paths).rows]
    assert len(set(names)) == len(names) == 3


def test_every_experiment_has_its_own_bound_and_baseline(tmp_path: Path) -> None:
    slow = {name: 10 * time_s for name, time_s in STEP_S.items()} | {"ddp": 0.4}
    comparison = compared(
        write_experiment(tmp_path / "slow", step_s=slow, repeats=3),
        write_experiment(tmp_path / "fast", step_s=STEP_S, repeats=3),
    )
    exposed = {name: comparison.row(name).above_bound for name in ("ddp", "ddp (2)")}
    assert exposed["ddp"] is not None
    assert exposed["ddp"].value == pytest.approx(0.75, abs=0.02)
    assert exposed["ddp (2)"] is not None
    assert exposed["ddp (2)"].value == pytest.approx(0.5, abs=0.02)
    baseline = comparison.over_one_process()
    assert comparison.decision.first == "ddp (2)"
    assert baseline is not None
    assert baseline[0].candidate.name == "single (2)"
    assert baseline[1].value == pytest.approx(4, rel=0.03)
    assert baseline[1].repeats == 3


def test_a_baseline_of_another_experiment_does_not_count(tmp_path: Path) -> None:
    ddp = [candidate for candidate in CLASSIC if candidate.name == "ddp"]
    comparison = compared(
        write_experiment(tmp_path / "fast", ddp, step_s=STEP_S),
        write_experiment(tmp_path / "slow", step_s={name: 10 * time_s for name, time_s in STEP_S.items()}),
    )
    assert comparison.decision.first == "ddp"
    assert comparison.over_one_process() is None
    assert comparison.row("ddp").above_bound is None
    assert comparison.pick is None


def test_times_of_separate_runs_are_not_paired(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=4)
    assert read_comparison(path).decision.outcome == "winner"
    comparison = compared_separately(path)
    ratio = comparison.decision.ratio
    assert comparison.decision.outcome == "undecided"
    assert ratio is not None
    assert (ratio.low, ratio.high, ratio.repeats) == (None, None, 0)
    assert ratio.value == pytest.approx(1.5, rel=0.03)
    assert comparison.row("allreduce").repeats == 4
    assert comparison.row("allreduce").step_s is not None
    assert comparison.row("allreduce").above_bound is None
    assert comparison.over_one_process() is None


def test_losses_and_accuracies_of_separate_runs_are_paired_by_seed(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=4)
    change(path, "repeat-*/3/summary.json", lambda summary: summary["test"].update(accuracy=0.2))
    (path / "repeat-1" / "4" / "run.json").unlink()
    comparison = compared_separately(path)
    gain = comparison.row("allreduce").accuracy_gain
    assert gain is not None
    assert (gain.value, gain.repeats) == (pytest.approx(-0.3), 3)
    loss_difference = next(
        loss_difference for loss_difference in comparison.loss_differences if loss_difference.candidate == "allreduce"
    )
    assert (loss_difference.reference, loss_difference.cause) == ("ddp", "none"), (
        "losses of different seeds would differ"
    )
    assert "Relative loss difference at every step" in render(comparison)


def test_runs_of_different_seeds_are_not_compared_by_loss(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [Candidate("p2p", "p2p"), Candidate("ddp", "ddp")], repeats=2)
    (path / "repeat-1" / "1" / "run.json").unlink()
    (path / "repeat-2" / "2" / "run.json").unlink()
    comparison = compared_separately(path)
    assert comparison.loss_differences == []
    assert comparison.row("p2p").accuracy_gain is None
    assert render(comparison)


def test_runs_of_one_seed_are_repeats_too(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=3)
    change(path, "run.json", lambda run: run["config"].update(seed=7))
    assert {row.repeats for row in compared_separately(path).rows} == {3}


def test_runs_without_a_recorded_seed_have_the_same(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=2)
    change(path, "run.json", lambda run: run["config"].pop("seed"))
    assert {row.repeats for row in compared_separately(path).rows} == {2}


def test_the_reference_of_separate_runs_is_ddp(tmp_path: Path) -> None:
    assert compared_separately(write_experiment(tmp_path / "e")).reference == "ddp"
    without = [candidate for candidate in CLASSIC if candidate.name != "ddp"]
    assert compared_separately(write_experiment(tmp_path / "f", without)).reference == "allreduce"
    assert compared_separately(write_experiment(tmp_path / "g", CLASSIC[:2])).reference == "single"


def test_runs_that_differ_in_ranks_or_host_have_it_in_their_names(tmp_path: Path) -> None:
    ddp = [Candidate("ddp", "ddp")]
    paths = [write_experiment(tmp_path / f"r{ranks}", ddp, repeats=2, ranks=ranks) for ranks in (2, 4)]
    runs = [folder for path in paths for folder in sorted(path.glob("repeat-*"))]
    names = {row.candidate.name: row.repeats for row in compare(collect_records(*find_records(runs))).rows}
    assert names == {"ddp ranks=2": 2, "ddp ranks=4": 2}
    assert {row.candidate.name for row in compared(*paths).rows} == {"ddp ranks=2", "ddp ranks=4"}
    change(paths[1], "run.json", lambda run: run["provenance"].update(host="there"))
    change(paths[1], "run.json", lambda run: run["topology"].update(workers=2, world_size=2))
    names = {row.candidate.name: row.repeats for row in compare(collect_records(*find_records(runs))).rows}
    assert names == {"ddp @here": 2, "ddp @there": 2}


def test_baselines_have_no_number_of_ranks_in_their_names(tmp_path: Path) -> None:
    paths = [write_experiment(tmp_path / f"r{ranks}", repeats=2, ranks=ranks) for ranks in (2, 4)]
    names = {row.candidate.name for row in compared(*paths).rows}
    assert {"single", "single (2)", "ddp ranks=2", "ddp ranks=4"} < names


def write_resolved(path: Path, **settings: Any) -> Path:
    """Write an experiment of ddp whose runs have the values of their recipe, as ranks record them."""
    write_experiment(path, [Candidate("ddp", "ddp")], settings=settings, proof=False)
    resolved = asdict(choose_recipe(RunConfig(**settings)))
    change(path, "run.json", lambda run: run["config"].update(resolved))
    return path


def names_with_run(experiment: Path, run_of: Path) -> list[str]:
    records, _ = find_records([experiment, run_of / "repeat-1" / "1"])
    return [candidate.name for candidate in collect_records(records).candidates]


def test_a_run_is_named_by_the_settings_that_differ_from_those_of_the_experiments_runs(tmp_path: Path) -> None:
    experiment = write_resolved(tmp_path / "a")
    assert names_with_run(experiment, write_resolved(tmp_path / "b")) == ["ddp", "ddp (2)"]
    other = write_resolved(tmp_path / "c", momentum=0.5)
    assert names_with_run(experiment, other) == ["ddp momentum=0.9", "ddp momentum=0.5"]


def test_a_recipe_and_the_same_one_by_default_are_one_candidate(tmp_path: Path) -> None:
    runs = [write_resolved(tmp_path / "a") / "repeat-1", write_resolved(tmp_path / "b", recipe="default") / "repeat-2"]
    (candidate,) = collect_records(*find_records(runs)).candidates
    assert candidate.name == "ddp"

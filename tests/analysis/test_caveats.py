"""Warnings above a comparison: replicas that differ, losses that are not finite, untracked traffic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace as change

from experiments_on_disk import falling, read_comparison, write_experiment
from paceline.analysis.caveats import caveats
from paceline.records.events import FailureEvent
from paceline.records.experiment import Candidate
from paceline.records.writer import encode
from paceline.report.run_description import outcome
from run_models import replicas, topology


def drifted(path: Path, place: int, apart: float | None) -> list[str]:
    """Return the warnings if replicas of the candidate at a position differ after the second repeat."""
    for file in path.glob(f"repeat-2/{place}/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"weight_divergence": apart}))
    return [warning for warning in read_comparison(path).warnings if "weights differ" in warning]


@pytest.mark.parametrize(("apart", "share"), [(0.12, "12%"), (2e-6, "0.0002%"), (1.5, "150%")])
def test_replicas_that_differ_are_reported(tmp_path: Path, apart: float, share: str) -> None:
    (warning,) = drifted(write_experiment(tmp_path / "e"), 3, apart)
    assert warning == (
        f"allreduce: weights differ by {share} between ranks at the end of the run, although the strategy is declared "
        "lossless. Its gradient synchronisation is probably wrong; do not trust its results."
    )


def test_differences_that_the_replica_guard_found_are_reported(tmp_path: Path) -> None:
    path, found = write_experiment(tmp_path / "e"), replicas()
    assert found.difference is not None
    large = change(found, difference=change(found.difference, by_rounding=False, distance=0.2))
    for place, own in ((3, found), (4, large)):
        file = path / "repeat-2" / str(place) / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"replicas": to_builtins(own)}))
    rounding, wrong = [warning for warning in read_comparison(path).warnings if "replicas differ" in warning]
    assert rounding.endswith("other processors or another order of summation explain it.")
    assert wrong.endswith("they were equal after step 4. Do not trust the results.")


@pytest.mark.parametrize("apart", [0.0, 1e-7, None])
def test_equal_replicas_are_not_reported(tmp_path: Path, apart: float | None) -> None:
    assert drifted(write_experiment(tmp_path / "e"), 3, apart) == []


def test_replicas_of_lossy_strategies_may_differ(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [Candidate("local", "local", lossless=False), Candidate("ddp", "ddp")])
    assert drifted(path, 1, 0.5) == []
    assert drifted(write_experiment(tmp_path / "classic"), 2, 0.9) == [], "the bound exchanges nothing"


def test_losses_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        diverges = candidate.name == "allreduce" or (candidate.name == "ddp" and repeat == 1)
        return math.nan if diverges and step >= 5 else falling(candidate, repeat, step)

    warnings = read_comparison(write_experiment(tmp_path / "e", losses=losses)).warnings
    found = [warning for warning in warnings if "diverged" in warning]
    assert len(found) == 2
    assert found[0].startswith(
        "allreduce diverged at step 5 (seed 0) and step 5 (seed 1), 2 of 2 repeats: the loss is not finite; the last "
        "finite one was 2.123. Losses and accuracies leave such runs out."
    )
    assert found[1].startswith("ddp diverged at step 5 (seed 1), 1 of 2 repeats: the loss is not finite;")
    assert "Check the data for NaN" not in found[0], "the data set was examined"


def test_candidates_that_diverge_alike_share_a_sentence(tmp_path: Path) -> None:
    warnings = read_comparison(write_experiment(tmp_path / "e", losses=lambda *_: math.nan)).warnings
    assert [
        w
        for w in warnings
        if w.startswith("single, none, allreduce and ddp diverged at step 0 (seed 0) and step 0 (seed 1)")
    ]


def test_of_many_diverged_runs_a_few_are_named(tmp_path: Path) -> None:
    warnings = read_comparison(write_experiment(tmp_path / "e", repeats=6, losses=lambda *_: math.nan)).warnings
    (warning,) = [warning for warning in warnings if "diverged" in warning]
    assert "step 0 (seed 1) and step 0 (seed 2) and 3 others, 6 of 6 repeats:" in warning


def test_a_failure_that_names_a_divergence_is_not_repeated(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", losses=lambda *_: math.nan)
    event = FailureEvent(candidate="ddp", stage="repeat 2", kind="DivergenceError", message="it diverged.", hint=None)
    with (path / "events.jsonl").open("ab") as file:
        file.write(encode(event) + b"\n")
    comparison = read_comparison(path)
    (warning,) = [warning for warning in comparison.warnings if "diverged" in warning]
    assert warning.startswith("single, none and allreduce diverged at")
    assert outcome(comparison.row("ddp")) == outcome(comparison.row("allreduce")) == "diverged"
    assert comparison.row("ddp").failure == "it diverged."


def test_a_normal_comparison_has_no_warnings(tmp_path: Path) -> None:
    assert read_comparison(write_experiment(tmp_path / "e")).warnings == []


@pytest.mark.parametrize(
    ("untracked", "warning"),
    [
        (
            {"groups": 1, "operations": 9},
            "allreduce created 1 process group outside Paceline, whose traffic is not in the time split. "
            "Create groups with comm.subgroup(ranks) to include it.",
        ),
        (
            {"groups": 0, "operations": 40},
            "allreduce ran 40 operations on process groups other than the run's, such as torch's default group; "
            "they are not in the time split. Use comm.group to include them.",
        ),
        ({"groups": 0, "operations": 0}, None),
        (None, None),
    ],
)
def test_untracked_traffic_is_reported_once(
    tmp_path: Path, untracked: dict[str, int] | None, warning: str | None
) -> None:
    path = write_experiment(tmp_path / "e")
    for file in path.glob("repeat-*/3/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"untracked": untracked}))
    assert read_comparison(path).warnings == ([] if warning is None else [warning])


def test_ranks_that_differ_share_a_warning(tmp_path: Path) -> None:
    record_set = read_comparison(write_experiment(tmp_path / "e")).record_set
    (warning,) = caveats(record_set, {"ddp": 0.061, "allreduce": 0.114, "single": None})
    assert warning.startswith("ddp and allreduce: step times differ by 6 to 11% between ranks;")
    (warning,) = caveats(record_set, {"ddp": 0.061})
    assert warning.startswith("ddp: step times differ by 6% between ranks;")
    assert warning.endswith("Stop other programs or use fewer ranks.")
    on_gpus = [
        replace(recorded, run=replace(recorded.run, topology=topology(device="cuda:0"))) for recorded in record_set.runs
    ]
    (warning,) = caveats(replace(record_set, runs=on_gpus), {"ddp": 0.061})
    assert "cores" not in warning, "ranks on GPUs are not slow because they share cores"

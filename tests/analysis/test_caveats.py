"""Warnings above a comparison: replicas that differ, losses that are not finite, untracked traffic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace as change

from experiments_on_disk import falling, read_comparison, write_experiment
from paceline.analysis.caveats import caveats, over_subscription
from paceline.records.description import RecordedEmulation
from paceline.records.events import ContinuedEvent, CudaGraphEvent, FailureEvent
from paceline.records.experiment.design import Candidate
from paceline.records.writer import encode
from paceline.report.run_description import outcome
from run_models import PROVENANCE, replicas, topology


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


def test_an_experiment_that_was_continued_elsewhere_is_reported(tmp_path: Path) -> None:
    """The first run of `ddp` was complete; the others were measured later, on another host and device."""
    path = write_experiment(tmp_path / "e")
    event = ContinuedEvent(provenance=change(PROVENANCE, host="there"), kept=["repeat-1/4"])
    with (path / "events.jsonl").open("ab") as file:
        file.write(encode(event) + b"\n")
    for run in path.glob("repeat-*/4/run.json"):
        described = json.loads(run.read_text())
        described["topology"]["device"] = "a GPU" if run.parts[-3] == "repeat-1" else "another GPU"
        run.write_text(json.dumps(described))
    machines, parts, devices = read_comparison(path).warnings
    assert machines.startswith("These records come from different machines: here (a processor), there (a processor).")
    assert parts == (
        "Repeat 1 was measured in parts, at different times: the experiment was continued. Ratios use only pairs of "
        "runs of the same part. The same command with a larger --repeats measures further repeats."
    )
    assert devices.startswith("ddp: its runs were trained on different devices: a GPU, another GPU.")


def graph_warnings(path: Path, decisions: dict[int, CudaGraphEvent]) -> list[str]:
    """Return the warnings on CUDA graphs, if these decisions were made in the runs at these positions."""
    for place, event in decisions.items():
        for file in path.glob(f"repeat-*/{place}/events.jsonl"):
            with file.open("ab") as stream:
                stream.write(encode(event) + b"\n")
    return [warning for warning in read_comparison(path).warnings if "CUDA graphs" in warning]


def test_candidates_without_cuda_graphs_are_reported_if_others_have_them(tmp_path: Path) -> None:
    used, expected = CudaGraphEvent(used=True), CudaGraphEvent(used=False, reason="of ddp.", is_expected=True)
    assert graph_warnings(write_experiment(tmp_path / "none"), {3: expected, 4: expected}) == []
    assert graph_warnings(write_experiment(tmp_path / "some"), {3: used, 4: expected}) == [
        "ddp was trained without CUDA graphs, which the strategy or the settings rule out, the others with them. "
        "--cuda-graph off compares all without graphs."
    ]
    failed = CudaGraphEvent(used=False, reason="the losses differ.")
    assert graph_warnings(write_experiment(tmp_path / "failed"), {4: failed}) == [
        "ddp was trained without CUDA graphs: the losses differ."
    ]
    partly = CudaGraphEvent(used=True, reason="batches differ.")
    assert graph_warnings(write_experiment(tmp_path / "partly"), {4: partly}) == [
        "ddp was trained with CUDA graphs in some steps only: batches differ."
    ]


def test_a_candidate_that_failed_does_not_divide_a_repeat(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=1)
    continued = ContinuedEvent(provenance=PROVENANCE, kept=["repeat-1/1", "repeat-1/2", "repeat-1/3"], retried=["ddp"])
    failed = FailureEvent(candidate="ddp", stage="repeat 1", kind="RankError", message="it failed.", hint=None)
    with (path / "events.jsonl").open("ab") as file:
        file.write(encode(continued) + b"\n")
    assert [warning for warning in read_comparison(path).warnings if "in parts" in warning]
    with (path / "events.jsonl").open("ab") as file:
        file.write(encode(failed) + b"\n")
    assert not [warning for warning in read_comparison(path).warnings if "in parts" in warning]


@pytest.mark.parametrize(
    ("workers", "changes", "phrase", "advice"),
    [
        (3, {"cores": 2.0}, "3 ranks share 2 cores", "Use fewer ranks or threads"),
        (2, {"cores": 2.0}, "", ""),
        (4, {"cores": 2.0, "threads": 2, "ranks_sharing_cores": 1}, "", ""),
        (1, {"cores": 2.0, "threads": 4}, "4 threads of 1 rank share 2 cores", "Use fewer ranks or threads"),
        (3, {"cores": 2.0, "ranks_per_host": 1, "emulated": None}, "", ""),
        (3, {"cores": 2.0, "ranks_per_host": 1, "emulated": "none"}, "3 ranks share 2 cores", "with --host-cpus"),
        (4, {"cores": 0.5, "ranks_per_host": 1, "emulated": 0.5}, "", ""),
        (4, {"cores": 0.5, "ranks_per_host": 2, "emulated": 0.5}, "2 ranks share 0.5 cores", "or change --host-cpus"),
        (3, {"cores": 1.0, "ranks_per_host": 1, "emulated": 1.0}, "3 hosts with 1 core each share 2 cores", "hosts"),
        (8, {"cores": 2.0, "device": "H200"}, "", ""),
    ],
)
def test_over_subscribed_cores_are_reported(
    tmp_path: Path, workers: int, changes: dict[str, Any], phrase: str, advice: str
) -> None:
    if changes.get("emulated") is not None:
        quota = None if changes["emulated"] == "none" else changes["emulated"]
        changes = changes | {"emulated": RecordedEmulation(spec="3@500mbit", host_cpus=quota)}
    run = next(iter(read_comparison(write_experiment(tmp_path / "e")).record_set.runs)).run
    shared = over_subscription(replace(run, topology=topology(workers, **changes)))
    assert shared.partition(": ")[0] == phrase
    assert advice in shared
    assert ("do not predict more machines." in shared) == bool(phrase)

"""`paceline scale` from the command line, with real ranks of several world sizes."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import forked, paceline, wait_until
from launch.test_leader import free_master
from paceline.analysis.record_set import collect_records
from paceline.analysis.scaling.curves import scaling
from paceline.records.experiment.record import read_experiment

pytestmark = pytest.mark.takes(20)

QUICK = ("--steps", "12", "--repeats", "1", "--batch", "32", "--no-doctor")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two strategies on one rank and on two, strong and weak scaling, shared by the tests that only read it."""
    out = tmp_path_factory.mktemp("scale") / "out"
    what = ("scale", "cnn", "--data", "digits", "--ranks", "1,2", "--mode", "strong,weak", "--strategies", "ddp,p2p")
    done = paceline(*what, *QUICK, "--out", str(out), "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"out": out, "messages": done.stderr}


def points(result: dict[str, Any], mode: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(point["strategy"], point["ranks"]): point for point in result["modes"][mode]["points"]}


def test_every_strategy_is_measured_at_every_world_size(scaled: dict[str, Any]) -> None:
    keys = {("single", 1), *[(name, ranks) for name in ("ddp", "p2p") for ranks in (1, 2)]}
    for mode, batches in (("strong", {1: 32, 2: 32}), ("weak", {1: 16, 2: 32})):
        found = points(scaled, mode)
        assert set(found) == keys
        assert all(point["batch"] == batches[ranks] for (_, ranks), point in found.items())
        assert all(point["step_s"]["value"] > 0 and point["epoch_s"]["value"] > 0 for point in found.values())
        assert all(sum(point["split_s"].values()) > 0 for point in found.values())
    assert points(scaled, "weak")["ddp", 2]["name"] == points(scaled, "strong")["ddp", 2]["name"], "measured once"


def test_runs_have_the_ranks_batches_and_threads_of_their_points(scaled: dict[str, Any]) -> None:
    experiment = read_experiment(scaled["out"])
    assert experiment.kind == "scale"
    assert len(experiment.runs) == 2 * 3 + 2
    for measured in experiment.runs:
        point, topology = measured.candidate.point, measured.run.topology
        assert point is not None
        assert topology.world_size == topology.workers == point.ranks
        assert topology.batch == point.batch
        assert measured.run.finished
        assert measured.run.summary is not None
        assert measured.run.summary.test is None, "scale does not evaluate the model"
    threads = {m.run.topology.threads for m in experiment.runs if m.candidate.role != "baseline"}
    assert len(threads) == 1, "the same threads per rank at every world size"


def test_strategies_are_proven_at_the_largest_world_size(scaled: dict[str, Any]) -> None:
    assert [(proof["candidate"], proof["ranks"], proof["holds"]) for proof in scaled["proofs"]] == [
        ("ddp on 2 ranks, batch 32", 2, True),
        ("p2p on 2 ranks, batch 32", 2, True),
    ]


def test_the_plan_is_printed_and_the_page_written(scaled: dict[str, Any], tmp_path: Path) -> None:
    assert "strong (global batch 32) and weak (batch 16 per rank) scaling" in scaled["messages"]
    assert Path(scaled["report"]).stat().st_size > 1e6
    done = paceline("report", str(scaled["out"]), "--out", str(tmp_path / "page.html"), "--csv", str(tmp_path / "csv"))
    assert "Weak scaling: every rank gets 16 samples" in done.stdout
    assert (tmp_path / "csv" / "scaling.csv").read_text().count("\n") == 1 + 2 * 5


def test_hosts_on_one_machine_share_its_cores(tmp_path: Path) -> None:
    """Two hosts on the loopback address share one core; with one rank, the second host is idle."""
    core = min(os.sched_getaffinity(0))
    what = ("scale", "user_workloads:plain", "--strategies", "ddp", "--ranks", "1,2", "--repeats", "1", "--steps", "8")
    how = ("--batch", "16", "--no-doctor", "--no-proof", "--hosts", "2", "--master", free_master())
    arguments = (*what, *how, "--out", str(tmp_path / "out"), "--json", "--node-rank")
    on_one_core = partial(os.sched_setaffinity, 0, {core})
    with forked(*arguments, "0", setup=on_one_core) as first, forked(*arguments, "1", setup=on_one_core) as second:
        leader, follower = first.wait(), second.wait()
    assert [leader.returncode, follower.returncode] == [0, 0], leader.stderr + follower.stderr
    assert follower.stdout == ""
    assert "2 ranks share 1 core: they take turns" in leader.stderr
    result = json.loads(leader.stdout)
    assert result["design"]["machines"] == [0, 0]
    found = points(result, "strong")
    assert found["ddp", 2]["hosts"] == 2
    assert found["ddp", 2]["oversubscribed"] == "2 ranks share 1 core"
    assert found["ddp", 2]["over_single"] is None
    assert found["ddp", 2]["over_one_rank"] is None
    assert found["ddp", 1]["over_single"] is not None
    assert {measured.run.topology.threads for measured in read_experiment(tmp_path / "out").runs} == {1}


def test_emulated_hosts_with_a_core_quota_give_speed_ups(tmp_path: Path) -> None:
    what = ("scale", "user_workloads:plain", "--strategies", "ddp", "--ranks", "1,2", "--repeats", "1", "--steps", "8")
    how = ("--batch", "16", "--no-doctor", "--no-proof", "--emulate", "2", "--host-cpus", "0.25")
    done = paceline(*what, *how, "--out", str(tmp_path / "out"))
    experiment = read_experiment(tmp_path / "out")
    assert experiment.design.machines == [0, 0]
    assert {measured.run.topology.cores for measured in experiment.runs} == {0.25}
    found = scaling(collect_records([experiment]))
    two = next(point for point in found.points("strong") if point.ranks == 2)
    assert (two.hosts, two.oversubscribed) == (2, "")
    assert two.over_single is not None
    assert two.over_single.efficiency is not None, "each rank has the same cores as single"
    assert "2/2" in done.stdout
    assert "no difference here is certain" in done.stdout


def test_usage_errors_are_found_before_any_rank_starts(tmp_path: Path) -> None:
    done = paceline("scale", "--ranks", "1,two", "--out", str(tmp_path / "out"), expect=2)
    assert "--ranks '1,two' is not a list of positive numbers" in done.stderr
    done = paceline("scale", "--batch", "1", "--ranks", "2", "--out", str(tmp_path / "out"), expect=2)
    assert "a global batch of 1 leaves some of the 2 ranks without a sample" in done.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_reports_the_runs_measured_so_far_and_failing_points_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    strategies = "schemes:Breaks,allreduce"
    what = ("scale", "user_workloads:plain", "--strategies", strategies, "--ranks", "1,2", *QUICK, "--repeats", "9")
    with forked(*what, "--no-proof", "--threads", "1", "--out", str(out)) as process:
        wait_until(lambda: list(out.glob("repeat-1/1x2/*allreduce*/finished")), "a repeat")
        os.kill(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130, done.stderr
    assert "schemes:Breaks on 2 ranks, batch 32 failed" in done.stderr
    assert "allreduce on 2 ranks" in done.stdout
    assert "This experiment was interrupted" in done.stdout
    assert (out / "report.html").exists()

"""`paceline compare` from the command line, with real ranks, failures and interrupts."""

from __future__ import annotations

import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import forked, paceline, wait_until
from paceline.analysis.steps.timing import losses_of
from paceline.records import read_run
from paceline.records.events import EstimateEvent, FailureEvent, InterruptedEvent
from paceline.records.experiment.record import read_experiment
from paceline.strategies.registry import SETS
from tries import eventually

pytestmark = pytest.mark.takes(45)

QUICK = ("--batch", "16", "--steps", "8", "--repeats", "2", "--max-repeats", "2", "--ranks", "2", "--no-doctor")
ONCE = (*QUICK, "--repeats", "1", "--max-repeats", "1", "--no-proof")


def compare(*arguments: str, out: Path) -> dict[str, Any]:
    """Run a comparison; return its JSON output, with stderr as `messages`."""
    done = paceline("compare", *arguments, "--out", str(out), "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"messages": done.stderr}


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Comparison of the usual set, shared by the tests that only read it."""
    out = tmp_path_factory.mktemp("usual") / "out"
    return compare(*QUICK, "--trace", out=out) | {"out": out}


def test_the_usual_set_is_proven_measured_and_explained(usual: dict[str, Any]) -> None:
    found = rows(usual)
    assert set(found) == set(SETS["usual"])
    assert {name: row["role"] for name, row in found.items() if row["role"] != "candidate"} == {
        "single": "baseline",
        "none": "bound",
    }
    assert all(row["repeats"] == 2 and row["step_s"]["value"] > 0 for row in found.values())
    assert found["ddp"]["ratio"] == {"value": 1.0, "low": None, "high": None, "repeats": 2, "each": [1.0, 1.0]}
    proofs = {proof["candidate"]: proof for proof in usual["proofs"]}
    assert all(proof["holds"] for name, proof in proofs.items() if name != "none")
    assert not proofs["none"]["lossless"]
    assert usual["verdict"]
    assert Path(usual["report"]).stat().st_size > 1e6
    assert [Path(trace).parent.name for trace in usual["traces"][:2]] == ["1-single", "1-single"]
    assert all(Path(trace).stat().st_size > 1000 for trace in usual["traces"])
    assert len(usual["traces"]) == len(found) * 2
    assert {reason["candidate"] for reason in usual["why"]} == set(found)


def test_rows_are_sorted_by_speed_and_none_and_single_have_no_exposed_communication(usual: dict[str, Any]) -> None:
    speeds = [row["samples_per_s"]["value"] for row in usual["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    found = rows(usual)
    assert found["none"]["exposed"] is None
    assert found["single"]["exposed"] is None
    assert 0 < found["p2p"]["exposed"]["value"] < 1


def test_the_remaining_time_is_estimated_as_runs_finish(usual: dict[str, Any]) -> None:
    estimates = read_experiment(usual["out"]).events_of(EstimateEvent)
    assert len(estimates) == 4, "before anything, after the proof, and after each repeat"
    assert all(0 < found.low_s < found.high_s <= found.most_s for found in estimates[:-1])
    assert estimates[-1].most_s == 0
    assert "\ntime: about " in usual["messages"]
    assert re.search(r"after 1 repeat, [^:]+ to go: ", usual["messages"])


def test_bytes_come_from_the_plans(usual: dict[str, Any]) -> None:
    sent = {name: row["busiest_sent_bytes"] for name, row in rows(usual).items()}
    parameters = read_experiment(usual["out"]).runs[0].run.topology.gradient_bytes
    on_two_ranks = {"single": 0, "none": 0, "shared_memory": 0, "priority": parameters, "ddp": parameters}
    on_two_ranks |= {"gather_scatter": parameters, "p2p": parameters, "allreduce": parameters}
    assert sent.items() >= on_two_ranks.items()
    assert sent.keys() == set(SETS["usual"])


def test_runs_are_interleaved_in_rotated_order_with_a_seed_per_repeat(usual: dict[str, Any]) -> None:
    experiment = read_experiment(usual["out"])
    order = [[m.candidate.name for m in experiment.runs if m.repeat == repeat] for repeat in (0, 1)]
    assert order[1] == order[0][1:] + order[0][:1]
    seeds = {(m.repeat, m.run.config["seed"]) for m in experiment.runs}
    assert seeds == {(0, 0), (1, 1)}
    starts = [m.run.provenance.time for m in experiment.runs]
    assert starts == sorted(starts)


def test_the_same_strategy_twice_follows_the_decision_rule(tmp_path: Path) -> None:
    """The rate of wrong winners is tested for `decide`, with simulated times."""
    result = compare("--strategies", "ddp,ddp", *QUICK, "--no-proof", "--max-repeats", "3", out=tmp_path / "out")
    assert sorted(rows(result)) == ["ddp", "ddp (2)"]
    decision = result["decision"]
    assert sorted((decision["first"], decision["second"])) == ["ddp", "ddp (2)"]
    assert {row["repeats"] for row in result["rows"]} == {decision["ratio"]["repeats"]}
    wins = decision["outcome"] == "winner"
    assert wins == (decision["ratio"]["low"] > 1.01)
    assert wins == ("Pick" in " ".join(result["verdict"]))
    assert decision["outcome"] != "undecided" or decision["ratio"]["repeats"] == 3, "undecided: measured to the limit"


def test_a_clear_winner_ends_the_comparison_before_the_limit(tmp_path: Path) -> None:
    strategies = ("user_workloads:plain", "--strategies", "allreduce,schemes:Slow")
    arguments = (*strategies, *QUICK, "--no-proof", "--max-repeats", "9")
    result = compare(*arguments, out=tmp_path / "out")
    assert result["decision"]["outcome"] == "winner"
    assert result["decision"]["first"] == "allreduce"
    assert rows(result)["allreduce"]["repeats"] < 9
    assert result["verdict"][0].startswith("Pick allreduce")
    assert result["next"] == "paceline train user_workloads:plain --batch 16 --strategy allreduce --ranks 2"


def test_a_strategy_that_sums_fails_the_proof(tmp_path: Path) -> None:
    arguments = (
        "compare",
        "user_workloads:plain",
        "--strategies",
        "allreduce,schemes:Sum",
        *QUICK,
        "--out",
        str(tmp_path / "o"),
    )
    done = paceline(*arguments, expect=7)
    assert "schemes:Sum on 2 ranks: the gradient is 2 times the mean over the ranks" in done.stderr
    assert not list((tmp_path / "o").glob("repeat-*"))


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Comparison in which one strategy fails during training, and another in `close`."""
    out = tmp_path_factory.mktemp("failing") / "out"
    strategies = "schemes:BadClose,allreduce,schemes:Breaks,ddp"
    return compare("user_workloads:plain", "--strategies", strategies, *QUICK, out=out) | {"out": out}


def test_a_strategy_that_fails_is_left_out_and_the_others_continue(failing: dict[str, Any]) -> None:
    found = rows(failing)
    assert "the seventh message was one too many" in found["schemes:Breaks"]["failure"]
    assert "schemes:Breaks failed and is left out" in failing["messages"]
    assert found["allreduce"]["repeats"] == found["ddp"]["repeats"] == 2
    experiment = read_experiment(failing["out"])
    assert sum(m.candidate.name == "schemes:Breaks" for m in experiment.runs) == 1
    assert [event.candidate for event in experiment.events_of(FailureEvent)] == ["schemes:BadClose", "schemes:Breaks"]


def test_a_failure_after_the_last_step_does_not_affect_the_next_run(failing: dict[str, Any]) -> None:
    found = rows(failing)
    assert "cannot close" in found["schemes:BadClose"]["failure"]
    assert found["allreduce"]["failure"] is None
    assert found["ddp"]["failure"] is None
    assert failing["decision"]["first"] != "schemes:BadClose"


def test_when_all_fail_the_first_failure_is_the_error(tmp_path: Path) -> None:
    arguments = (
        "compare",
        "user_workloads:plain",
        "--strategies",
        "schemes:Breaks",
        *ONCE,
        "--out",
        str(tmp_path / "out"),
    )
    done = paceline(*arguments, expect=6)
    assert "error: rank 1 failed: RuntimeError: the seventh message was one too many" in done.stderr


def test_a_strategy_whose_ranks_send_different_sizes_is_left_out_with_the_cause(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = compare("user_workloads:plain", "--strategies", "schemes:OtherSizes,allreduce", *ONCE, out=out)
    failed, trained = (rows(found)[name] for name in ("schemes:OtherSizes", "allreduce"))
    assert "ranks called different collectives, or the same one with different sizes" in failed["failure"]
    assert trained["failure"] is None
    assert trained["repeats"] == 1


def test_a_workload_that_cannot_be_trained_fails_before_any_rank_starts(tmp_path: Path) -> None:
    done = paceline("compare", "user_workloads:unused", *QUICK, "--out", str(tmp_path / "out"), expect=4)
    assert "got no gradient" in done.stderr
    assert not (tmp_path / "out").exists()


def test_settings_are_compared_like_strategies(tmp_path: Path) -> None:
    """Settings of the length of a run can vary too."""
    settings = ("--vary", "reshuffle=true,false", "--vary", "epochs=2,4", "--batch", "4", "--ranks", "2")
    once = ("--repeats", "1", "--max-repeats", "1", "--no-proof", "--no-doctor")
    result = compare("user_workloads:plain", *settings, *once, out=tmp_path / "out")
    runs = {m.candidate.name: m.run for m in read_experiment(tmp_path / "out").runs}
    assert set(rows(result)) == set(runs)
    assert {name: (run.config["reshuffle"], len(run.steps[0])) for name, run in runs.items()} == {
        "reshuffle=true epochs=2": (True, 32),
        "reshuffle=true epochs=4": (True, 64),
        "reshuffle=false epochs=2": (False, 32),
        "reshuffle=false epochs=4": (False, 64),
    }


def test_precisions_are_compared(tmp_path: Path) -> None:
    """Under fp16 the first scale is too large for this workload, so some steps are skipped, on all ranks together."""
    options = ("--vary", "precision=fp32,fp16,bf16", "--strategies", "bucketed", "--lr", "0.001")
    result = compare("user_workloads:overflowing", *QUICK, "--max-repeats", "1", *options, out=tmp_path / "out")
    experiment = read_experiment(tmp_path / "out")
    runs = {m.candidate.name: m.run for m in experiment.runs}
    assert set(rows(result)) == set(runs) == {f"precision={name}" for name in ("fp32", "fp16", "bf16")}
    skipped = {name: run.summary and run.summary.skipped_steps for name, run in runs.items()}
    assert skipped.pop("precision=fp16") in range(1, 8)
    assert set(skipped.values()) == {0}
    assert [run.summary and run.summary.weight_divergence for run in runs.values()] == [0] * 3
    first = {name: losses_of(run)[0] for name, run in runs.items()}
    assert first == {name: pytest.approx(first["precision=fp32"], rel=0.02) for name in runs}
    assert all(math.isfinite(loss) for run in runs.values() for loss in losses_of(run))
    assert "8 steps × 1 repeat\n" in result["messages"], "the most repeats are fewer than the repeats asked for"
    assert {row["repeats"] for row in result["rows"]} == {1}


def test_a_candidate_that_diverges_drops_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    options = ("--vary", "lr=0.01,1e30", "--strategies", "allreduce", "--seed", "3", "--no-proof")
    result = compare("user_workloads:plain", *QUICK, *options, out=tmp_path / "out")
    found = rows(result)
    diverged, rest = found["lr=1e+30"], found["lr=0.01"]
    (where,) = diverged["diverged"]
    assert (where["seed"], where["loss"]) == (3, None)
    start = f"the run diverged at step {where['step']} (seed 3): the loss is not finite; the last finite one was "
    assert diverged["failure"].startswith(start)
    assert f"lr=1e+30 failed and is left out: {start}" in result["messages"]
    assert [diverged[key] for key in ("train_loss", "test_loss", "test_accuracy", "accuracy_gain")] == [None] * 4
    assert (rest["repeats"], rest["failure"], rest["diverged"]) == (2, None, [])
    assert rest["train_loss"]["repeats"] == 2
    (failure,) = read_experiment(tmp_path / "out").events_of(FailureEvent)
    assert (failure.kind, failure.stage) == ("DivergenceError", "repeat 1")

    more = ("--repeats", "3", "--max-repeats", "3")
    result = compare("user_workloads:plain", *QUICK, *options, *more, out=tmp_path / "out")
    assert rows(result)["lr=1e+30"]["failure"] == diverged["failure"], "the same seed would diverge again"
    assert rows(result)["lr=0.01"]["repeats"] == 3
    assert "3 of 4 runs are there" in result["messages"]
    assert not [warning for warning in result["warnings"] if "in parts" in warning]
    assert not list((tmp_path / "out").glob("incomplete*"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert start.partition(";")[0] in page


def test_batches_are_compared_by_the_time_per_sample(tmp_path: Path) -> None:
    found = rows(compare("user_workloads:plain", "--vary", "batch=8,64", *ONCE, out=tmp_path / "out"))
    per_sample = {batch: found[f"batch={batch}"]["step_s"]["value"] / batch for batch in (8, 64)}
    for batch, sample_s in per_sample.items():
        row = found[f"batch={batch}"]
        assert row["samples_per_s"]["value"] == pytest.approx(1 / sample_s)
        assert row["ratio"]["value"] == pytest.approx(sample_s / per_sample[8])


@pytest.mark.parametrize("when", ["proof", "repeat-2"])
def test_ctrl_c_reports_the_runs_measured_so_far(tmp_path: Path, when: str) -> None:
    out = tmp_path / "out"
    what = ("user_workloads:plain", "--strategies", "allreduce,ddp", "--batch", "16", "--ranks", "2", "--steps", "20")
    how = ("--repeats", "9", "--max-repeats", "9", "--no-doctor", *(["--no-proof"] if when != "proof" else []))
    with forked("compare", *what, *how, "--out", str(out)) as process:
        wait_until(lambda: (out / when / "job.json").exists(), f"{when} has begun")
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        os.killpg(process.pid, signal.SIGINT)
        done = process.wait()
    output = done.stdout + done.stderr
    assert done.returncode == 130, output
    assert "interrupted" in output
    assert (out / "report.html").is_file(), output
    wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in ranks), "the ranks have ended")
    experiment = read_experiment(out)
    assert experiment.events_of(InterruptedEvent)
    finished = [m for m in experiment.runs if m.run.finished]
    if when == "repeat-2":
        assert len(finished) >= 2
        assert re.search(r"ddp +\d", output)
    else:
        assert not finished
        assert "No candidate was timed, so there is none to pick." in output


def test_ctrl_c_while_the_report_is_written_does_not_stop_it(tmp_path: Path) -> None:
    """The page is written to a pipe that the test reads only after Ctrl-C, so it always arrives during writing."""
    out = tmp_path / "out"
    out.mkdir()
    what = ("user_workloads:plain", "--strategies", "allreduce,ddp", *ONCE)
    with forked("compare", *what, "--out", str(out)) as command:
        os.mkfifo(out / f".report.html.{command.pid}")
        pipe = os.open(out / f".report.html.{command.pid}", os.O_RDWR | os.O_NONBLOCK)
        wait_until(lambda: select.select([pipe], [], [], 0)[0], "the page is being written")
        for _ in range(3):
            os.killpg(command.pid, signal.SIGINT)
        page = b""
        while command.process.is_alive() or select.select([pipe], [], [], 0)[0]:
            if select.select([pipe], [], [], 0.1)[0]:
                page += os.read(pipe, 1 << 20)
        os.close(pipe)
        done = command.wait()
    assert done.returncode == 130, done
    assert "Traceback" not in done.stderr
    assert page.rstrip().endswith(b"</html>")
    assert (out / "report.html").exists()
    assert "report: " in done.stdout


def test_too_few_steps_are_an_error(tmp_path: Path) -> None:
    done = paceline("compare", "user_workloads:plain", "--steps", "5", "--out", str(tmp_path / "out"), expect=2)
    assert "leaves no step to measure" in done.stderr


def test_report_works_without_torch(usual: dict[str, Any], tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main(sys.argv[1:])"
    page = tmp_path / "page.html"
    arguments = [
        sys.executable,
        "-c",
        blocked,
        "report",
        str(usual["out"]),
        "--out",
        str(page),
        "--csv",
        str(tmp_path),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 1e6
    header, *lines = (tmp_path / "comparison.csv").read_text().splitlines()
    assert header.startswith("candidate,strategy,role")
    assert len(lines) == len(SETS["usual"])


def test_single_runs_are_combined_into_one_report(usual: dict[str, Any], tmp_path: Path) -> None:
    for earlier, name in (("6-ddp", "ddp-0"), ("5-allreduce", "allreduce-0")):
        shutil.copytree(usual["out"] / "repeat-1" / earlier, tmp_path / name)
    arguments = ("--strategy", "ddp", "--seed", "1", "--batch", "16", "--steps", "8", "--ranks", "2")
    paceline("train", *arguments, "--out", str(tmp_path / "ddp-1"))
    done = paceline("report", str(tmp_path), "--json", "--out", str(tmp_path / "page.html"))
    result = json.loads(done.stdout)
    assert {name: row["repeats"] for name, row in rows(result).items()} == {"ddp": 2, "allreduce": 1}
    assert any("measured at different times" in warning for warning in result["warnings"])
    assert read_run(tmp_path / "ddp-1").finished


@pytest.mark.timing
def test_a_rank_that_is_slowed_on_purpose_computes_the_same_and_is_reported(tmp_path: Path) -> None:
    result = compare(*ONCE, "--steps", "30", "--batch", "64", "--vary", "slow_rank=,1:4", out=tmp_path / "out")
    found = rows(result)
    even, slowed = found["slow_rank=none"], found["slow_rank=1:4"]
    assert slowed["train_loss"]["value"] == even["train_loss"]["value"]
    split = slowed["split"]["ranks"]["1"]
    assert split["descheduled_s"] < 0.5 * (split["compute_s"] + split["overlapped_s"])
    (reason,) = [r for r in result["why"] if r["candidate"] == "slow_rank=1:4" and r["limit"] == "straggler"]
    assert "for rank 1, which was slowed down 4× on purpose" in reason["text"]
    assert "slow_rank=1:4: rank 1 was slowed down 4× on purpose (--slow-rank)." in result["warnings"]


def test_runs_with_a_time_limit_end_after_equal_time(tmp_path: Path) -> None:
    short = ("--batch", "16", "--repeats", "1", "--max-repeats", "1", "--ranks", "2", "--no-doctor", "--no-proof")
    strategies = "ddp,parameter_server:asynchronous=true"
    result = compare(*short, "--seconds", "1.5", "--strategies", strategies, out=tmp_path / "out")
    assert "· 1.5 s × 1 repeat" in result["messages"]
    assert "--seconds 3" in result["next"] or "--seconds" not in result["next"]
    for measured in read_experiment(tmp_path / "out").runs:
        summary = measured.run.summary
        assert summary is not None
        assert summary.train_s is not None
        assert 1.2 < summary.train_s < 8, "a busy machine may delay the last steps"
        assert summary.steps > 5
        assert summary.test is not None
        assert summary.test.accuracy is not None


@pytest.mark.timing
def test_exposed_communication_and_batches_have_the_measured_speeds(tmp_path: Path) -> None:
    """p2p exposes what its step takes beyond that of `none`; a larger batch trains more samples per second."""

    def check(attempt: int) -> None:
        out = tmp_path / f"exposed{attempt}"
        found = rows(compare("--strategies", "none,p2p", *QUICK, "--no-proof", out=out))
        expected = 1 - found["none"]["step_s"]["value"] / found["p2p"]["step_s"]["value"]
        assert found["p2p"]["exposed"]["value"] == pytest.approx(expected, abs=0.3)
        out = tmp_path / f"batches{attempt}"
        found = rows(compare("user_workloads:plain", "--vary", "batch=8,64", *ONCE, out=out))
        assert found["batch=64"]["samples_per_s"]["value"] > found["batch=8"]["samples_per_s"]["value"]

    eventually(check)


@pytest.mark.timing
def test_a_time_limit_is_kept_within_two_seconds(tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        out = tmp_path / f"out{attempt}"
        short = ("--batch", "16", "--repeats", "1", "--max-repeats", "1", "--ranks", "2", "--no-doctor", "--no-proof")
        strategies = "ddp,parameter_server:asynchronous=true"
        compare(*short, "--seconds", "1.5", "--strategies", strategies, out=out)
        for measured in read_experiment(out).runs:
            summary = measured.run.summary
            assert summary is not None
            assert summary.train_s is not None
            assert 1.2 < summary.train_s < 3
            assert summary.steps > 40

    eventually(check)

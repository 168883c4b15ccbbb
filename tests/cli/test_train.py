"""`paceline train` from the command line, with real ranks, failures and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from commands import LIMIT_S, USER_CODE, forked, paceline, wait_until
from paceline.analysis.traffic.payload import PLAN, RECORDED_OPERATIONS, payload_of
from paceline.config import RunConfig
from paceline.measure.cores import threads_per_rank
from paceline.records import RunRecord, read_run
from paceline.records.events import RUN_EVENTS, LogEvent, events_of, read_events
from paceline.records.experiment.record import read_experiment
from tries import eventually

pytestmark = pytest.mark.takes(35)

SLOW = ("user_workloads:slow", "--batch", "8", "--epochs", "2000")


def train(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `paceline train`, and check its exit code."""
    return paceline("train", *arguments, expect=expect)


def ranks_of(out: Path) -> list[psutil.Process]:
    """Return the rank processes of a run: those whose stdout is a log file of that run."""
    logs = str(out / "logs" / "rank-")
    return [process for process in psutil.process_iter() if _stdout_file(process.pid).startswith(logs)]


def _stdout_file(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")  # noqa: PTH115
    except OSError:
        return ""


def losses(record: RunRecord) -> list[float]:
    """Return the global loss of every step."""
    return [loss for event in record.events_of(LogEvent) for loss in event.losses]


def test_a_run_writes_a_complete_record(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train(
        "cnn",
        "--ranks",
        "2",
        "--batch",
        "64",
        "--epochs",
        "2",
        "--recipe",
        "classic",
        "--lr",
        "0.02",
        "--out",
        str(out),
        "--eval-ranks",
        "--trace",
    )
    record = read_run(out)
    assert record.finished
    assert record.summary is not None
    assert [len(steps) for steps in record.steps.values()] == [46, 46]
    assert len(losses(record)) == 46
    for rank in (0, 1):
        steps = record.steps[rank]
        assert list(steps["step"]) == list(range(46))
        assert steps["samples"].sum() == pytest.approx(1437, abs=1)
        assert (steps.total_s > 0).all()
        assert (out / "logs" / f"rank-{rank}.log").exists()
    trained_samples = sum(rank.samples for rank in record.summary.ranks)
    assert trained_samples == 2 * 1437
    assert record.summary.test.samples == 360
    assert record.summary.test.accuracy > 0.6
    assert [replica.accuracy for replica in record.summary.test_by_rank] == [record.summary.test.accuracy] * 2
    assert record.summary.weight_divergence == 0
    replicas = record.summary.replicas
    assert replicas is not None
    assert (replicas.mode, replicas.difference) == ("stop", None)
    assert replicas.checks >= 4, "windows that contain 1, 2 and 4, 8 and 16, 32, and the end"
    assert replicas.share == pytest.approx(replicas.seconds / record.summary.train_s)
    assert "replicas: identical on all ranks in " in done.stdout
    assert record.provenance.versions["torch"]
    assert record.provenance.command.startswith("paceline train cnn --ranks 2")
    assert "evaluated 360/360 unique samples" in done.stdout
    assert f"trace: {out / 'trace.json'} (open it in ui.perfetto.dev)" in done.stdout
    traced = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in traced if event["name"] == "step 45"} == {0, 1}
    assert "batch 64 = 2 × 32 · sgd, lr 0.02, constant · " in done.stderr
    assert f"{threads_per_rank(2)} thread" in done.stderr
    assert "gloo over lo" in done.stderr
    assert "step     20" in done.stderr
    assert "step     40" in done.stderr


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Six steps of a run of ten epochs, with a model that has unused parameters: the record's folder, and stdout."""
    out = tmp_path_factory.mktemp("estimated") / "run"
    options = ("--allow-unused", "--steps", "6", "--epochs", "10", "--batch", "16", "--json", "--out", str(out))
    return out, train("user_workloads:unused", *options).stdout


def test_json_has_the_steps_and_the_estimate(estimated: tuple[Path, str]) -> None:
    summary = json.loads(estimated[1])
    assert summary["steps"] == 6
    step_s = summary["step_s"]
    assert summary["estimate"] == {"epochs": 10, "seconds": pytest.approx(step_s * 4 * 10)}


def test_unused_parameters_can_be_allowed(estimated: tuple[Path, str]) -> None:
    assert read_run(estimated[0]).finished


def test_a_record_is_never_overwritten(estimated: tuple[Path, str]) -> None:
    out, _ = estimated
    before = (out / "run.json").read_text()
    done = train("user_workloads:plain", "--ranks", "1", "--out", str(out), expect=8)
    assert "already contains a record" in done.stderr
    assert (out / "run.json").read_text() == before


@pytest.fixture(scope="module")
def normalised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """Runs of a model with BatchNorm on three ranks, with every strategy and mode that could change its losses."""
    out = tmp_path_factory.mktemp("normalised") / "out"
    what = (
        "user_workloads:normalised",
        "--strategies",
        "single,allreduce,ddp",
        "--vary",
        "bn=sync,local",
        "--ranks",
        "3",
    )
    how = ("--batch", "20", "--epochs", "2", "--deterministic", "--repeats", "1", "--max-repeats", "1")
    paceline("compare", *what, *how, "--no-proof", "--no-doctor", "--out", str(out))
    return {measured.candidate.name: measured.run for measured in read_experiment(out).runs}


def test_without_a_plan_bytes_on_sockets_equal_the_recorded_operations(normalised: dict[str, RunRecord]) -> None:
    for strategy in ("allreduce", "ddp"):
        # BatchNorm's statistics are not in the strategy's plan.
        payload = payload_of(normalised[f"{strategy} bn=sync"])
        assert payload is not None
        assert (payload.expected_from, payload.holds) == (RECORDED_OPERATIONS, True)
        assert min(rank.sent_bytes for rank in payload.ranks) > 0
    planned = payload_of(normalised["ddp bn=local"])
    assert planned is not None
    assert (planned.expected_from, planned.deviation) == (PLAN, 0.0)


def test_idle_ranks_and_one_process_give_the_same_losses(normalised: dict[str, RunRecord], tmp_path: Path) -> None:
    alone = normalised["single bn=sync"]
    assert list(alone.steps) == [0]
    assert len(losses(alone)) == 10
    for strategy in ("allreduce", "ddp"):
        assert losses(normalised[f"{strategy} bn=sync"]) == pytest.approx(losses(alone), rel=1e-4)
    options = ("--strategy", "single", "--ranks", "2", "--batch", "20", "--epochs", "2", "--deterministic")
    train("user_workloads:normalised", *options, "--out", str(tmp_path / "run"))
    record = read_run(tmp_path / "run")
    assert list(record.steps) == [0]
    assert losses(record) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("bn", ["sync", "local"])
def test_batchnorm_losses_do_not_depend_on_the_world_size_if_synchronised(
    normalised: dict[str, RunRecord], bn: str
) -> None:
    alone, together = (losses(normalised[f"{strategy} bn={bn}"]) for strategy in ("single", "ddp"))
    assert (together == pytest.approx(alone, rel=1e-4)) == (bn == "sync")


def test_ranks_with_different_numbers_of_batches_train_equal_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("user_workloads:uneven", "--epochs", "2", "--log-every", "3", "--out", str(out))
    assert [len(steps) for steps in read_run(out).steps.values()] == [10, 10]


def test_a_failing_rank_ends_the_run_with_its_own_traceback(tmp_path: Path) -> None:
    began = time.monotonic()
    done = train(
        "user_workloads:fails_on_rank_1", "--batch", "8", "--epochs", "200", "--out", str(tmp_path / "run"), expect=6
    )
    assert "rank 1 failed: RuntimeError: sample 17 is damaged" in done.stderr
    assert "in fail\n" in done.stderr
    assert "hint: " in done.stderr
    assert time.monotonic() - began < RunConfig().timeout_s, "no rank waits for the time-out"
    assert not ranks_of(tmp_path / "run")


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    done = train(
        "user_workloads:killed_on_rank_1", "--batch", "8", "--epochs", "200", "--out", str(tmp_path / "run"), expect=6
    )
    assert "error: rank 1 was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
    assert not ranks_of(tmp_path / "run")


MISMATCH = "ranks called different collectives, or the same one with different sizes"


def test_ranks_that_send_different_sizes_are_told_apart(tmp_path: Path) -> None:
    options = ("--batch", "8", "--strategy", "schemes:OtherSizes", "--out", str(tmp_path / "run"))
    done = train("user_workloads:plain", *options, expect=6)
    assert f"error: rank 1 was killed by SIGABRT: {MISMATCH} (a message of " in done.stderr
    assert "rank 1 was in all_reduce at schemes.py:" in done.stderr
    assert "hint: call the same collectives on all ranks" in done.stderr
    assert "in agree" in done.stderr, "with the stack of the rank"


def test_ranks_that_call_different_collectives_are_told_apart(tmp_path: Path) -> None:
    options = ("--batch", "8", "--timeout", "4", "--strategy", "schemes:OtherKinds", "--out", str(tmp_path / "run"))
    done = train("user_workloads:plain", *options, expect=6)
    assert "rank 0 was in all_reduce at schemes.py:" in done.stderr
    assert "rank 1 was in broadcast at schemes.py:" in done.stderr
    assert "call the same collectives on all ranks" in done.stderr


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    options = ("--batch", "8", "--epochs", "9", "--timeout", "4", "--out", str(tmp_path / "run"))
    done = train("user_workloads:hangs_on_rank_1", *options, expect=6)
    assert "rank 0 stopped waiting for other ranks" in done.stderr
    assert "rank 1 did not respond" in done.stderr
    assert "in hang\n" in done.stderr
    assert not ranks_of(tmp_path / "run")


def test_unused_parameters_are_named_before_training(tmp_path: Path) -> None:
    done = train("user_workloads:unused", "--out", str(tmp_path / "run"), expect=4)
    assert "2 parameters got no gradient on rank" in done.stderr
    assert "aux.weight, aux.bias" in done.stderr
    assert "--allow-unused" in done.stderr


@pytest.mark.parametrize(
    ("workload", "difference"),
    [
        ("wider_on_rank_1", "0.weight has shape (5, 4) on rank 0 and (6, 4) on rank 1"),
        ("integer_buffer_on_rank_1", "mask is bool on rank 0 and int32 on rank 1"),
        ("reordered_on_rank_1", "0.a.weight on rank 0 is at the place of 0.b.weight on rank 1"),
    ],
)
def test_a_model_that_differs_between_ranks_is_named_before_training(
    tmp_path: Path, workload: str, difference: str
) -> None:
    done = train(
        f"user_workloads:{workload}", "--ranks", "2", "--batch", "16", "--out", str(tmp_path / "run"), expect=4
    )
    message, hint = done.stderr.splitlines()[-2:]
    assert message == f"error: the ranks have different models: {difference}."
    assert hint.startswith("hint: create the same model on every rank")
    assert not events_of(read_events(tmp_path / "run" / "events.jsonl", RUN_EVENTS), LogEvent), "no step was trained"


def test_weights_that_differ_between_ranks_become_those_of_rank_0(tmp_path: Path) -> None:
    losses = []
    for workload in ("other_weights_on_rank_1", "plain"):
        settings = ("--ranks", "2", "--batch", "16", "--steps", "4", "--out", str(tmp_path / workload))
        train(f"user_workloads:{workload}", *settings)
        events = read_events(tmp_path / workload / "events.jsonl", RUN_EVENTS)
        losses.append([event.losses for event in events_of(events, LogEvent)])
    assert losses[0] == losses[1]


def test_replicas_that_differ_stop_the_run(tmp_path: Path) -> None:
    what = ("user_workloads:plain", "--strategy", "schemes:Silent", "--ranks", "2", "--batch", "16", "--steps", "6")
    done = train(*what, "--out", str(tmp_path / "stops"), expect=10)
    message, hint = done.stderr.splitlines()[-2:]
    assert message.startswith("error: replicas differ after step 4: ")
    assert "a strategy of your own must synchronise every gradient" in hint
    assert "Traceback" not in done.stderr
    done = train(*what, "--out", str(tmp_path / "warns"), "--replica-guard", "warn", "--json")
    replicas = json.loads(done.stdout)["replicas"]
    assert replicas["difference"]["ranks"] == [0, 1]
    assert not replicas["difference"]["by_rounding"]
    assert "warning: schemes:Silent: replicas differ after step" in done.stderr
    off = train(*what, "--out", str(tmp_path / "off"), "--replica-guard", "off", "--json")
    assert json.loads(off.stdout)["replicas"] is None


def test_a_step_that_bypasses_the_model_is_an_error_with_a_hint(tmp_path: Path) -> None:
    done = train("user_workloads:past_the_model", "--out", str(tmp_path / "run"), expect=6)
    assert "call only model(…) in the step" in done.stderr


def test_data_loading_counts_as_step_time_and_ranks_shuffle_equally(tmp_path: Path) -> None:
    found = {}
    for ranks in ("1", "2"):
        out = tmp_path / ranks
        train("user_workloads:slow_stream", "--ranks", ranks, "--epochs", "3", "--lr", "0.01", "--out", str(out))
        record = read_run(out)
        assert record.summary is not None
        assert len(record.steps[0]) == 36
        assert record.steps[0]["data_s"].sum() > 36 * 0.01
        assert record.summary.train_s > 36 * 0.01
        found[ranks] = losses(record)
    assert found["2"] == pytest.approx(found["1"], rel=1e-4)
    assert found["1"][:12] != pytest.approx(found["1"][12:24], rel=1e-3)


def test_a_failing_evaluation_keeps_the_record_of_the_training(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train("user_workloads:fails_in_the_test", "--batch", "16", "--out", str(out), expect=6)
    assert "no such label in the test" in done.stderr
    record = read_run(out)
    assert not record.finished
    assert record.summary is not None
    assert record.summary.steps == 4


def test_the_error_of_an_earlier_attempt_is_not_reported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "run")
    for mistake in ("the old mistake", "the new one"):
        monkeypatch.setenv("PACELINE_TEST_MISTAKE", mistake)
        assert f"ValueError: {mistake}" in train("user_workloads:attempt", "--out", out, expect=4).stderr


def test_a_master_name_that_cannot_be_resolved(tmp_path: Path) -> None:
    done = train(
        "user_workloads:plain", "--master", "no.such.host.invalid:29500", "--out", str(tmp_path / "run"), expect=5
    )
    assert "the host name 'no.such.host.invalid' in --master cannot be resolved" in done.stderr


def test_settings_are_checked_before_data_is_downloaded(tmp_path: Path) -> None:
    options = ("--data", "cifar10", "--data-dir", str(tmp_path / "nothing"), "--out", str(tmp_path / "run"))
    assert "no ddp option" in train("cnn", *options, "--strategy", "ddp:bukcet_mb=1", expect=2).stderr
    assert "a global batch of 2" in train("cnn", *options, "--ranks", "4", "--batch", "2", expect=2).stderr
    assert not (tmp_path / "run").exists()


def steps_done(out: Path) -> int:
    """Return the number of steps that rank 0 has written to its record."""
    file = out / "rank-0.csv"
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def test_a_place_for_the_weights_is_checked_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file, out = tmp_path / "file" / "weights.safetensors", tmp_path / "run"
    done = train("cnn", "--data", "synthetic", "--steps", "1", "--save", str(file), "--out", str(out), expect=12)
    assert f"the weights cannot be written to {file}: {tmp_path / 'file'} is not a folder." in done.stderr
    assert not out.exists()


def test_a_closed_terminal_ends_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with forked("train", *SLOW, "--out", str(out)) as process:
        wait_until(lambda: steps_done(out) > 0, "the first step")
        os.kill(process.pid, signal.SIGHUP)
        done = process.wait()
    assert done.returncode == 130
    assert f"interrupted; the record so far is in {out}" in done.stderr.replace("\n", "")


def test_nohup_ignores_sighup_and_ctrl_c_keeps_the_record(tmp_path: Path) -> None:
    out = tmp_path / "run"
    nohup = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with forked("train", *SLOW, "--out", str(out), setup=nohup) as process:
        wait_until(lambda: steps_done(out) > 0, "the first step")
        os.killpg(process.pid, signal.SIGHUP)
        begun = steps_done(out)
        wait_until(lambda: steps_done(out) > begun + 30, "30 more steps")
        os.killpg(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130
    assert f"interrupted; the record so far is in {out}" in done.stderr.replace("\n", "")
    assert not ranks_of(out)
    record = read_run(out)
    assert not record.finished
    assert len(record.steps[0]) >= 30


@pytest.mark.timing
def test_ranks_end_within_10_s_of_ctrl_c_and_of_the_end_of_their_launcher(tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            out = tmp_path / f"{number.name}-{attempt}"
            with forked("train", *SLOW, "--out", str(out)) as process:
                wait_until(lambda out=out: steps_done(out) > 0, "the first step")  # type: ignore[misc]
                ranks = ranks_of(out)
                os.kill(process.pid, number)
                _, alive = psutil.wait_procs(ranks, timeout=10)
            assert len(ranks) == 2
            assert not alive

    eventually(check)


def test_only_loopback_ports_are_open_and_ranks_end_with_a_killed_launcher(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    with forked("train", *SLOW, "--out", str(out)) as process:
        wait_until(lambda: (out / "rank-0.csv").exists() and (out / "rank-1.csv").exists(), "the first step")
        ranks = ranks_of(out)
        assert len(ranks) == 2
        processes = [psutil.Process(process.pid), *ranks]
        listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) == {"127.0.0.1"}
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
        assert not read_run(out).finished


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        done = train("cnn", "--master", master, "--out", str(tmp_path / "run"), expect=5)
    assert f"cannot listen on {master}: Address already in use" in done.stderr


@pytest.mark.soak  # The suite has a comparison under torchrun.
def test_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = ["paceline", "train", "user_workloads:plain", "--batch", "16", "--out", str(out)]
    done = subprocess.run(
        [*launcher, *arguments], cwd=USER_CODE, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_run(out).finished
    assert done.stdout.count("unique samples") == 1


def test_a_run_that_diverges_stops_with_its_own_exit_code_and_keeps_its_record(tmp_path: Path) -> None:
    options = ("--lr", "1e30", "--batch", "16", "--steps", "40", "--seed", "5", "--out", str(tmp_path / "out"))
    done = train("user_workloads:plain", *options, "--json", expect=11)
    error, hint = done.stderr.splitlines()[-2:]
    assert re.fullmatch(
        r"error: the run diverged at step \d \(seed 5\): the loss is not finite; the last finite one was \S+\.", error
    )
    assert hint == (
        "hint: use a lower --lr, a longer --warmup-epochs or --clip-norm 1, or skip such steps with --on-nan skip"
    )
    assert json.loads(done.stdout)["divergence"]["step"] == int(error.split()[6])
    record = read_run(tmp_path / "out")
    assert not record.finished
    assert 0 < len(losses(record)) < 40


def test_steps_are_skipped_on_request_and_counted(tmp_path: Path) -> None:
    options = ("--batch", "16", "--epochs", "3", "--on-nan", "skip", "--ranks", "2", "--out", str(tmp_path / "out"))
    done = train("user_workloads:one_infinite_sample", *options)
    assert "skipped the update of 3 steps because gradients were not finite" in done.stdout
    assert "  skipped the update of " in done.stderr
    assert "diverged" not in done.stdout
    summary = read_run(tmp_path / "out").summary
    assert summary is not None
    assert (summary.skipped_steps, summary.divergence) == (3, None)
    assert summary.average_loss is not None

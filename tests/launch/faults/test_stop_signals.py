"""SIGTERM and SIGUSR1 while ranks train with checkpoints, sent to real launchers and, as Slurm does, to their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from commands import forked, paceline, wait_until
from launch.test_leader import free_master
from paceline.errors import RecordError
from paceline.launch.faults import stop_signals
from paceline.launch.faults.restarts import last_step
from paceline.launch.faults.stop_signals import STOP_REQUESTS, EarlyStop, GracefulStop
from paceline.records import RunFolder, read_run

pytestmark = pytest.mark.takes(8)

RUN = ("--batch", "16", "--steps", "100000", "--checkpoint-every", "1000")


def test_a_run_stops_at_a_checkpoint_and_resumes(tmp_path: Path) -> None:
    """All processes of the run receive the signals, as in a Slurm step, also the workers of its DataLoaders."""
    out = tmp_path / "run"
    with forked("train", "user_workloads:slow_with_workers", *RUN, "--max-restarts", "1", "--out", str(out)) as run:
        wait_until(lambda: last_step(out), "the first window")
        with pytest.raises(RecordError), RunFolder.locked(out):
            pass
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
                process.send_signal(number)
        done = run.wait()
    assert done.returncode == 75, done.stderr
    assert "SIGUSR1 asked to stop: ranks write a checkpoint, within 30 s" in done.stderr
    record = read_run(out)
    step = record.summary.steps if record.summary is not None else 0
    assert f"error: the run was asked to stop, and did so after step {step}; its checkpoint is written." in done.stderr
    assert (out / "checkpoints" / f"step-{step:08d}").is_dir()
    done = paceline("train", "--resume", "auto", "--steps", str(step + 10), "--out", str(out))
    assert f"resumed at step {step}\n" in done.stderr
    assert read_run(out).finished


def test_ranks_without_a_part_in_the_run_end_with_it(tmp_path: Path) -> None:
    """Under `single`, rank 1 waits for the end of the run, or for its stop."""
    out = tmp_path / "run"
    with forked("train", "user_workloads:slow", *RUN, "--strategy", "single", "--ranks", "2", "--out", str(out)) as run:
        wait_until(lambda: last_step(out), "the first window")
        os.kill(run.pid, signal.SIGTERM)
        done = run.wait()
    assert done.returncode == 75, done.stderr
    assert "did not stop" not in done.stderr


def test_ranks_that_do_not_stop_in_time_are_ended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("user_workloads:hangs_on_rank_1", *RUN, "--grace", "1", "--out", str(out))
    with forked("train", *options) as run:
        wait_until(lambda: (out / "events.jsonl").exists(), "the run")
        begun_s = time.monotonic()
        os.kill(run.pid, signal.SIGTERM)
        done = run.wait()
    assert done.returncode == 130, done.stderr
    assert "ranks did not stop within 1 s (--grace), and are ended" in done.stderr
    assert time.monotonic() - begun_s < 20


def test_a_signal_to_a_follower_stops_all_hosts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("train", "user_workloads:slow", *RUN, "--hosts", "2", "--ranks", "2", "--master", free_master())
    commands = [(*options, "--node-rank", str(number), "--out", str(out)) for number in range(2)]
    with forked(*commands[0]) as leader, forked(*commands[1]) as follower:
        wait_until(lambda: last_step(out), "the first window")
        os.kill(follower.pid, signal.SIGUSR1)
        outputs = [leader.wait(), follower.wait()]
    assert [done.returncode for done in outputs] == [75, 75], outputs
    assert "another host asked to stop" in outputs[0].stderr
    for done in outputs:
        assert "error: the run was asked to stop, and did so after step " in done.stderr


FORKING_RANK = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
import multiprocessing, os, subprocess, time
from paceline.launch.rank import leave_stop_signals_to

leave_stop_signals_to(os.getppid())
workers = [multiprocessing.Process(target=time.sleep, args=(60,)) for _ in range(2)]
for worker in workers:
    worker.start()
    subprocess.run(["kill", str(worker.pid)], check=True)
workers[0].join(0.5)
print([worker.exitcode for worker in workers], workers[1].pid, flush=True)
workers[0].terminate()
for worker in workers:
    worker.join(30)
print([worker.exitcode for worker in workers])
"""


def test_processes_that_a_rank_forks_end_only_by_their_parent_and_the_launcher() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKING_RANK], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        codes, _, worker = rank.stdout.readline().rpartition(" ")
        assert codes == "[None, None]"
        os.kill(int(worker), signal.SIGTERM)
        assert rank.communicate()[0] == "[-15, -15]\n"


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_REQUESTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop_with(asked: threading.Event, grace_s: float = 60.0, *, elsewhere: bool = False) -> GracefulStop:
    return GracefulStop(asked.set, lambda: elsewhere, grace_s, notify=lambda _: None)


@pytest.mark.usefixtures("_handlers")
def test_a_second_sigterm_ends_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "REPEAT_WINDOW_S", 0.0)
    stop = stop_with(asked := threading.Event())

    def receive(*numbers: signal.Signals) -> None:
        with stop.handling(lambda: None):
            for number in numbers:
                signal.raise_signal(number)
                time.sleep(0.01)
            assert asked.wait(10)

    receive(signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM)
    with pytest.raises(SignalException):
        receive(signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOP_REQUESTS] == [signal.SIG_DFL] * 2


@pytest.mark.usefixtures("_handlers")
def test_several_sigterm_at_once_count_as_one() -> None:
    stop = stop_with(asked := threading.Event())
    with stop.handling(lambda: None):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert asked.wait(10)
    assert stop.requested
    assert not stop.expired


@pytest.mark.usefixtures("_handlers")
def test_a_signal_just_before_the_ranks_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "POLL_S", 60.0)
    polled = threading.Event()
    stop = GracefulStop(lambda: None, lambda: bool(polled.set()), 60.0, notify=lambda _: None)
    with stop.handling(lambda: None):
        assert polled.wait(10)
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested, "the run is not started again"


@pytest.mark.usefixtures("_handlers")
def test_ignored_signals_stay_ignored_and_other_hosts_can_ask() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ended = threading.Event()
    stop = stop_with(asked := threading.Event(), grace_s=0.01, elsewhere=True)
    with stop.handling(ended.set):
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert asked.wait(10)
        assert ended.wait(10)
    assert stop.expired


@pytest.mark.usefixtures("_handlers")
def test_a_signal_before_the_ranks_are_started_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, early = threading.Event(), EarlyStop()
    with early.kept():
        signal.raise_signal(signal.SIGUSR1)
        stop = GracefulStop(asked.set, lambda: False, 60.0, notify=lambda _: None, early=early)
        with stop.handling(lambda: None):
            assert asked.wait(10)
        assert (stop.requested, stop.received) == (True, signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(stop_signals, "REPEAT_WINDOW_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOP_REQUESTS] == [signal.SIG_DFL] * 2

"""Effect of Ctrl-C on ranks under torch's elastic launcher."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from commands import wait_until
from paceline.config import LaunchConfig, RunConfig
from paceline.launch.channel.own_command import OwnCommand
from paceline.launch.elastic import stopped_log_tails
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.launch.leader import Leader, join_launch
from paceline.records import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # No process waits for ranks that the launcher lost.


def job_in(folder: Path) -> tuple[Job, Leader]:
    """Return a job of one run, and a leader that can start its ranks."""
    job = Job.single(RunConfig(steps=8), RunFolder.create(folder), iface=None, threads=1)
    leader = join_launch(LauncherProcess(), LaunchConfig(), {}, OwnCommand(configs=()), timeout_s=10, notify=print)
    assert leader is not None
    return job, leader


def ranks_of(job: Job) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if str(job.file) in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_ranks_that_were_just_started_end_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's launcher does not track these ranks yet, so it does not stop them."""
    start, started = SubprocessContext._start, []
    job, leader = job_in(tmp_path)

    def interrupted(context: SubprocessContext) -> None:
        start(context)
        wait_until(lambda: len(ranks_of(job)) == 2, "the ranks have their command line")
        started.extend(ranks_of(job))
        raise KeyboardInterrupt

    monkeypatch.setattr(SubprocessContext, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leader.run(job, Shape(1, 2))
    assert len(started) == 2
    wait_until(lambda: not ranks_of(job), "the ranks have ended")


def test_the_launcher_leaves_ctrl_c_to_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    during = {}
    start = SubprocessContext._start
    job, leader = job_in(tmp_path)

    def read_handlers(context: SubprocessContext) -> None:
        during.update({number: signal.getsignal(number) for number in before})
        start(context)
        raise KeyboardInterrupt

    monkeypatch.setattr(SubprocessContext, "_start", read_handlers)
    with pytest.raises(KeyboardInterrupt):
        leader.run(job, Shape(1, 1))
    assert during[signal.SIGINT] is before[signal.SIGINT]
    assert during[signal.SIGTERM] is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_ctrl_c_during_the_start_leaves_no_thread_that_reads_logs(tmp_path: Path) -> None:
    """A thread that goes on reading would keep the process from ending."""
    log = tmp_path / "stdout.log"
    log.touch()
    tail = TailLog("rank", {0: str(log)}, sys.stdout)

    def interrupted() -> None:
        with stopped_log_tails():
            tail.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert tail.stopped()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("TailLog_rank")]

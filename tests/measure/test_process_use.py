"""Use of CPUs and files: a process that works is told from one that waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import wait_until
from paceline.measure.process_use import CpuTime, ProcessUse, process_state


def spend(seconds: float) -> None:
    began_s = time.process_time()
    while time.process_time() < began_s + seconds:
        pass


def test_a_process_that_computes_is_busy_and_one_that_sleeps_is_not() -> None:
    use = ProcessUse()
    spend(0.3)
    assert use.is_busy()
    spend(0.3)
    assert use.is_busy(main_thread_only=True)
    time.sleep(1.0)
    assert not use.is_busy(main_thread_only=True)


def test_a_process_that_writes_is_busy(tmp_path: Path) -> None:
    use = ProcessUse()
    (tmp_path / "a").write_bytes(bytes(2**21))
    assert use.is_busy()
    (tmp_path / "b").write_bytes(bytes(2**21))
    time.sleep(0.5)
    assert not use.is_busy(main_thread_only=True), "a rank that waits in an operation, and whose loader reads ahead"


def test_a_child_that_computes_counts() -> None:
    """As a worker of a DataLoader does."""
    use = ProcessUse()
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert use.is_busy()
        child.kill()


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "works"), [(0.2, 0.0, True), (0.02, 0.1, False), (0.03, 0.9, True), (0.0, 0.0, False)]
)
def test_a_thread_that_waits_for_a_core_all_the_time_works(ran_s: float, waited_s: float, works: bool) -> None:
    assert CpuTime(5 + ran_s, 7 + waited_s).shows_work_since(CpuTime(5, 7), 1.0) == works


def test_the_state_of_a_stopped_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert process_state(child.pid) in {"R", "S", "D"}
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(child.pid) == "T", "it is stopped")
        child.kill()
    assert process_state(child.pid) == ""

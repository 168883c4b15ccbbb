"""Tell a process that works from one that only waits, by the CPU time and the file traffic of it and its children."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

BUSY_SHARE = 0.1
"""Share of a core from which a process counts as busy."""
RUNNABLE_SHARE = 0.8
"""Share of the time, running or waiting for a core, from which a process counts as busy on a host with too few cores. A
process that wakes up now and then waits for a core, too, but not that long."""
BUSY_BYTES = 2**20
"""Bytes read and written between two samples from which a process counts as busy."""
_DISK_STATE = "D"
"""State of a thread that waits for a disk or a network drive."""
_PROC = Path("/proc")


class CpuTime(NamedTuple):
    """Time of a thread or of several."""

    ran_s: float
    waited_s: float
    """Seconds in which it could have run and waited for a core; 0 where unknown."""

    def shows_work_since(self, before: CpuTime, passed_s: float) -> bool:
        """Return whether so much of the time since an earlier sample was used that the thread works."""
        ran_s, waited_s = self.ran_s - before.ran_s, self.waited_s - before.waited_s
        return ran_s >= BUSY_SHARE * passed_s or ran_s + waited_s >= RUNNABLE_SHARE * passed_s


class _Sample(NamedTuple):
    at_s: float
    all_threads: CpuTime
    """Time of all threads of all processes."""
    main_thread: CpuTime
    bytes: int


class ProcessUse:
    """Use of CPUs and files by this process and its children, such as the workers of a DataLoader."""

    def __init__(self) -> None:
        self._last = _take_sample()

    def is_busy(self, *, main_thread_only: bool = False) -> bool:
        """Return whether the processes worked since the last call, or wait for a disk now; begin a new interval.

        With `main_thread_only`, the main thread of this process alone counts.
        """
        before, self._last = self._last, _take_sample()
        last, passed_s = self._last, max(self._last.at_s - before.at_s, 1e-3)
        if main_thread_only:
            return last.main_thread.shows_work_since(before.main_thread, passed_s)
        return (
            last.all_threads.shows_work_since(before.all_threads, passed_s)
            or last.bytes - before.bytes >= BUSY_BYTES
            or process_state(os.getpid()) == _DISK_STATE
        )


def _take_sample() -> _Sample:
    times, size, own = list[CpuTime](), 0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(OSError, ValueError, psutil.Error):
            times += _thread_times(process)
            size += _file_bytes(process.pid)
    total = CpuTime(sum(one.ran_s for one in times), sum(one.waited_s for one in times))
    return _Sample(time.monotonic(), total, main_thread_time(own.pid), size)


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, as in `ps`: R, S, D, T; empty if there is no process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def main_thread_time(pid: int) -> CpuTime:
    """Return the time of the main thread of a process; zeros where unknown."""
    with suppress(OSError, ValueError):
        return _read_time(_PROC / str(pid))
    return CpuTime(0.0, 0.0)


def _thread_times(process: psutil.Process) -> list[CpuTime]:
    """Return the times of all threads of a process, or where the kernel does not tell, of the whole process."""
    folder, found = _PROC / str(process.pid) / "task", list[CpuTime]()
    if not (folder / str(process.pid) / "schedstat").exists():
        used = process.cpu_times()
        return [CpuTime(used.user + used.system, 0.0)]
    for thread in folder.iterdir():
        with suppress(OSError):  # The thread has ended.
            found.append(_read_time(thread))
    return found


def _read_time(folder: Path) -> CpuTime:
    ran_ns, waited_ns, *_ = (folder / "schedstat").read_text().split()
    return CpuTime(int(ran_ns) / 1e9, int(waited_ns) / 1e9)


def _file_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written."""
    lines = (_PROC / str(pid) / "io").read_text().splitlines()
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))

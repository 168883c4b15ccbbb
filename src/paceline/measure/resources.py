"""Samples what a rank uses: CPU time, memory, threads; on the first rank of a host, what the host does too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from paceline.records.schema import ResourceRow
from paceline.records.writer import ResourceWriter

PERIOD_S = 0.5
MOST_OF_A_CORE = 0.004
"""The share of a core that sampling may take. Below the 0.5% that we promise, since a sample is paid for afterwards."""
ROWS_BEFORE_STRETCHING = 2000
"""From then on the period grows with the age of the run: a run of a day keeps 11,000 rows, not 170,000."""


class ProcessProbe:
    """Reads the counters of this process, of its GPU, and of the host."""

    def __init__(self, device: torch.device, *, with_host: bool) -> None:
        self._process = psutil.Process()
        self._device = device if device.type == "cuda" else None
        self._host = HostProbe() if with_host else None

    def read(self, time_s: float, sampler_cpu_s: float) -> ResourceRow:
        """What has been used by now."""
        allocated = used = None
        if self._device is not None:
            free, total = torch.cuda.mem_get_info(self._device)
            allocated, used = torch.cuda.memory_allocated(self._device), total - free
        host = self._host.read() if self._host is not None else NO_HOST
        # The clock of the process is finer than psutil's count of it, in ticks of 10 ms.
        cpu_s, memory = time.process_time(), self._process.memory_info()
        return ResourceRow(
            time_s, cpu_s, memory.rss, self._process.num_threads(), sampler_cpu_s, allocated, used, *host
        )


class HostUse(NamedTuple):
    """What a host does, whoever makes it."""

    busy: float | None
    used_bytes: int | None
    available_bytes: int | None


NO_HOST = HostUse(None, None, None)


class HostProbe:
    """Reads the counters of the host, on the cores that this process may run on."""

    def __init__(self) -> None:
        own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self._own_cores = own if own and len(own) < (psutil.cpu_count() or 1) else None
        self._last = self._cpu_times()

    def read(self) -> HostUse:
        """What it has done since the last time."""
        memory = psutil.virtual_memory()
        idle_s, total_s = self._cpu_times()
        passed_s = total_s - self._last[1]
        busy = 1 - (idle_s - self._last[0]) / passed_s if passed_s > 0 else None
        if passed_s > 0:
            self._last = (idle_s, total_s)
        return HostUse(busy and min(1.0, max(0.0, busy)), memory.used, memory.available)

    def _cpu_times(self) -> tuple[float, float]:
        """Seconds that the cores were idle, and all seconds that they had."""
        cores = [psutil.cpu_times()]
        if self._own_cores is not None:
            everyone = psutil.cpu_times(percpu=True)
            cores = [everyone[core] for core in sorted(self._own_cores) if core < len(everyone)]
        idle_s = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
        # A guest's time is in its host's already.
        guests_s = sum(getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0) for core in cores)
        return idle_s, sum(sum(core) for core in cores) - guests_s


class ResourceSampler:
    """Samples in a thread of its own, from `start` to `close`, as often as costs next to nothing."""

    def __init__(
        self,
        probe: ProcessProbe,
        writer: ResourceWriter,
        now: Callable[[], float],
        also: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe = probe
        self._writer = writer
        self._now = now
        self._also = also
        """What is done after each sample: another writer that would like to be called now and then."""
        self._thread_s = 0.0
        self._callers_s = 0.0
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline resources", daemon=True)

    @property
    def cost_s(self) -> float:
        """CPU time that sampling has taken so far."""
        return self._thread_s + self._callers_s

    def start(self) -> None:
        """Takes the first sample, and goes on in the background."""
        self.sample()
        self._thread.start()

    def sample(self) -> None:
        """One sample more, taken by the calling thread: where a part of the run ends that has figures of its own."""
        before_s = time.thread_time()
        self._take()
        self._callers_s += time.thread_time() - before_s

    def close(self) -> None:
        """Takes the last sample."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample()
        self._writer.close()

    def _run(self) -> None:
        began_s = time.monotonic()
        wait_s = PERIOD_S
        while not self._stop.wait(wait_s):
            self._take()
            self._thread_s = time.thread_time()
            wait_s = next_wait_s(time.monotonic() - began_s, self.cost_s)

    def _take(self) -> None:
        with self._writing:
            self._writer.write([self._probe.read(self._now(), self.cost_s)])
            self._also()


def next_wait_s(age_s: float, cost_s: float) -> float:
    """How long to wait for the next sample, after so many seconds and so much CPU time spent on samples."""
    affordable_s = cost_s / MOST_OF_A_CORE - age_s
    return max(PERIOD_S, age_s / ROWS_BEFORE_STRETCHING, affordable_s)

"""Sample the CPU time, memory and threads of a rank and, on the first rank of a host, the use of the host."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import psutil
import torch

from paceline.measure.gpu_readings import NO_READINGS, gpu_probe
from paceline.records.resources import Resources
from paceline.records.schema import SAMPLE_DECIMALS, ResourceRow
from paceline.records.writer import ResourceWriter

PERIOD_S = 0.5
MAX_CORE_SHARE = 0.004
"""Share of a core that sampling may use. It is below the promised 0.5%, since a sample's cost is known only later."""
ROWS_AT_FULL_RATE = 2000
"""After these the period grows with the age of the run: a run of a day has 11,000 rows instead of 170,000."""


class ProcessProbe:
    """Reader of the counters of this process, of its GPU, and optionally of the host."""

    def __init__(self, device: torch.device, *, with_host: bool) -> None:
        self._process = psutil.Process()
        self._device = device if device.type == "cuda" else None
        self._gpu = gpu_probe(device)
        self._host = HostProbe() if with_host else None

    def read(self, time_s: float, sampler_cpu_s: float) -> ResourceRow:
        """Return the resource use up to now."""
        allocated = used = None
        if self._device is not None:
            free, total = torch.cuda.mem_get_info(self._device)
            allocated, used = torch.cuda.memory_allocated(self._device), total - free
        gpu = self._gpu.read() if self._gpu is not None else NO_READINGS
        host = self._host.read() if self._host is not None else NO_HOST
        # `process_time` is more precise than psutil, which counts in ticks of 10 ms.
        cpu_s, memory = round(time.process_time(), SAMPLE_DECIMALS), self._process.memory_info()
        time_s, threads = round(time_s, SAMPLE_DECIMALS), self._process.num_threads()
        row = ResourceRow(time_s, cpu_s, memory.rss, threads, sampler_cpu_s, allocated, used, *host)
        return (
            row
            if gpu is NO_READINGS
            else row._replace(**{f"gpu_{name}": value for name, value in gpu._asdict().items()})
        )


class HostUse(NamedTuple):
    """CPU and memory use of a host by all processes."""

    busy: float | None
    used_bytes: int | None
    available_bytes: int | None


NO_HOST = HostUse(None, None, None)


class HostProbe:
    """Reader of the host's counters, on the cores that this process may run on."""

    def __init__(self) -> None:
        own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self._own_cores = own if own and len(own) < (psutil.cpu_count() or 1) else None
        self._last = self._cpu_times()

    def read(self) -> HostUse:
        """Return the host's use; the CPU share is that since the last call."""
        memory = psutil.virtual_memory()
        idle_s, total_s = self._cpu_times()
        passed_s = total_s - self._last[1]
        busy = 1 - (idle_s - self._last[0]) / passed_s if passed_s > 0 else None
        if passed_s > 0:
            self._last = (idle_s, total_s)
        return HostUse(busy and min(1.0, max(0.0, busy)), memory.used, memory.available)

    def _cpu_times(self) -> tuple[float, float]:
        """Return the idle seconds and the total seconds of the cores."""
        cores = [psutil.cpu_times()]
        if self._own_cores is not None:
            all_cores = psutil.cpu_times(percpu=True)
            cores = [all_cores[core] for core in sorted(self._own_cores) if core < len(all_cores)]
        idle_s = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
        # The user time already includes the guests' time.
        guests_s = sum(getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0) for core in cores)
        return idle_s, sum(sum(core) for core in cores) - guests_s


class ResourceSampler:
    """Sampler that runs in a separate thread from `start` to `close`, at a rate that costs very little CPU time."""

    def __init__(
        self,
        probe: ProcessProbe,
        writer: ResourceWriter,
        now: Callable[[], float],
        after_sample: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe = probe
        self._writer = writer
        self._values = array("d")
        self._now = now
        self._after_sample = after_sample
        """Called after each sample, for other writers that need a regular call."""
        self._thread_s = 0.0
        self._callers_s = 0.0
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline resources", daemon=True)

    @property
    def cost_s(self) -> float:
        """CPU seconds that sampling has used so far."""
        return self._thread_s + self._callers_s

    def start(self) -> None:
        """Take the first sample, and continue in the background."""
        self.sample()
        self._thread.start()

    def sample(self) -> None:
        """Take an extra sample in the calling thread, at the end of a part of the run that is reported separately."""
        before_s = time.thread_time()
        self._take()
        self._callers_s += time.thread_time() - before_s

    def samples(self) -> Resources:
        """Return the samples taken so far. They stay in memory: 128 bytes each, 1.4 MB after a day."""
        with self._writing:
            table = np.array(self._values).reshape(-1, len(ResourceRow._fields))
        return Resources({name: table[:, index] for index, name in enumerate(ResourceRow._fields)})

    def close(self) -> None:
        """Take the last sample, and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample()
        self._writer.close()

    def _run(self) -> None:
        started_s = time.monotonic()
        wait_s = PERIOD_S
        while not self._stop.wait(wait_s):
            self._take()
            self._thread_s = time.thread_time()
            wait_s = next_wait_s(time.monotonic() - started_s, self.cost_s)

    def _take(self) -> None:
        with self._writing:
            row = self._probe.read(self._now(), self.cost_s)
            self._writer.write([row])
            self._values.extend(math.nan if value is None else value for value in row)
            self._after_sample()


def next_wait_s(age_s: float, cost_s: float) -> float:
    """Return the seconds until the next sample, given the run's age and the CPU seconds spent on samples."""
    affordable_s = cost_s / MAX_CORE_SHARE - age_s
    return max(PERIOD_S, age_s / ROWS_AT_FULL_RATE, affordable_s)

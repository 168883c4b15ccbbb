"""Measure the cores that other programs use while this process computes, and those that they would use without it."""

from __future__ import annotations

import time

from paceline.measure.cores import affine_cores
from paceline.measure.resources import HostProbe


class OtherProgramsProbe:
    """Counter of the use of the cores by other programs, from its creation on."""

    def __init__(self) -> None:
        self._host = HostProbe()
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the creation."""
        return time.perf_counter() - self._began_s

    def used_cores(self) -> float | None:
        """Return the mean number of cores that other programs have used; None if the time was too short to know."""
        own = self._cpu_s / self.elapsed_s
        busy = self._host.read().busy
        return None if busy is None else max(0.0, busy * affine_cores() - own)

    def wanted_cores(self) -> float | None:
        """Return the cores that other programs would use if they had one for each thread; None if it is unknown.

        This process must have computed on one thread all the time. Threads that share cores wait equally long for them,
        so the others have waited as long for each second of CPU time as this process.
        """
        own_s, used = self._cpu_s, self.used_cores()
        return None if used is None or not own_s else used * max(1.0, self.elapsed_s / own_s)

    @property
    def _cpu_s(self) -> float:
        return time.process_time() - self._began_cpu_s

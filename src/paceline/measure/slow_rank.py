"""Slow a rank down on purpose: it sleeps in proportion to its compute time, so that other ranks keep their cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.measure.clock import Clock, clock_for
from paceline.measure.operations import OperationLog
from paceline.measure.steps import BACKWARD, FORWARD, Stopwatch, make_stopwatch


class SlowRankStopwatch(Stopwatch):
    """A stopwatch under which forward and backward take `factor` times as long.

    The sleep happens before backward, in proportion to the time of this forward pass and of the previous backward pass.
    So all gradients of the pass are late, as on slow hardware. A sleep after backward would not delay strategies that
    send gradients while backward runs.

    The time of a pass is the CPU time of the compute thread: waiting for other ranks inside `backward()` is not compute
    and takes no longer on slow hardware. A rank with half a core needs two seconds of wall time for each second of CPU
    time, and so sleeps twice as long (`core_share`). On a GPU it is the wall time from one synchronisation to the next,
    until the last gradient is ready.
    """

    needs_details = True

    def __init__(self, clock: Clock, operations: OperationLog | None, factor: float, core_share: float = 1.0) -> None:
        super().__init__(clock, operations)
        self._excess = (factor - 1) / (core_share if clock.on_host else 1.0)
        self._compute_s: Callable[[], float] = time.thread_time if clock.on_host else self._device_s
        self._due_s = 0.0
        self._backward_s = 0.0
        self._since_s = 0.0

    def lap(self, phase: int) -> None:
        now_s = self._compute_s()
        if phase == FORWARD:
            self._sleep(now_s - self._since_s)
        super().lap(phase)
        if phase == FORWARD:
            self._sleep(self._backward_s)
        elif phase == BACKWARD:
            self._backward_s = (now_s if self.clock.on_host else self._backward_ended_s()) - self._since_s
        self._since_s = self._compute_s()

    def _sleep(self, computed_s: float) -> None:
        """Sleep for the extra time that slower compute would take; deduct oversleeping from the next sleep."""
        self._due_s += self._excess * computed_s
        started_s = time.perf_counter()
        self.is_sleeping = True
        time.sleep(max(0.0, self._due_s))
        self.is_sleeping = False
        slept_s = time.perf_counter() - started_s
        self._due_s -= slept_s
        self.clock.slept_s += slept_s

    def _device_s(self) -> float:
        torch.cuda.synchronize()
        return self.clock.now()

    def _backward_ended_s(self) -> float:
        """Return the time of the last gradient on a GPU; the rest of the pass is waiting, not compute."""
        ended = next(mark for phase, mark, _ in reversed(self._laps.ends) if phase == BACKWARD)
        self.clock.wait(ended)
        return self.clock.read(ended)


def stopwatch_for(device: torch.device, *, events: bool, factor: float, core_share: float) -> Stopwatch:
    """Return the stopwatch of a rank that runs `factor` times as slow; a plain one if `factor` is 1."""
    if factor == 1:
        return make_stopwatch(device, events=events)
    clock = clock_for(device)
    return SlowRankStopwatch(clock, OperationLog(clock) if events else None, factor, core_share)

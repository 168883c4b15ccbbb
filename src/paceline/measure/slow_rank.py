"""Slows a rank down on purpose: it sleeps in proportion to what it has computed, so that others keep their cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.measure.clock import Clock, clock_for
from paceline.measure.operations import OperationLog
from paceline.measure.steps import BACKWARD, FORWARD, Stopwatch, make_stopwatch


class SlowRankStopwatch(Stopwatch):
    """A stopwatch under which forward and backward take `factor` times as long.

    The sleep comes before backward: of this forward's time, and of what the backward pass before this one took. So all
    gradients of the pass are late, as on slow hardware; a sleep after it would let those strategies off that send
    gradients while backward runs.

    What a pass took is the processor time of the thread that computes it: to wait for others inside `backward()` is no
    computing, and no slower on slow hardware. A rank that has half a core to itself needs two seconds for each of
    these (`core_share`), and so sleeps for twice as long. On a GPU it is wall time, from one synchronisation to the
    next, until the last gradient is there.
    """

    def __init__(self, clock: Clock, operations: OperationLog | None, factor: float, core_share: float = 1.0) -> None:
        super().__init__(clock, operations)
        self._excess = (factor - 1) / (core_share if clock.on_host else 1.0)
        self._spent_s: Callable[[], float] = time.thread_time if clock.on_host else self._device_s
        self._owed_s = 0.0
        self._backward_s = 0.0
        self._since_s = 0.0

    def lap(self, phase: int) -> None:
        now_s = self._spent_s()
        if phase == FORWARD:
            self._sleep(now_s - self._since_s)
        super().lap(phase)
        if phase == FORWARD:
            self._sleep(self._backward_s)
        elif phase == BACKWARD:
            self._backward_s = (now_s if self.clock.on_host else self._backward_ended_s()) - self._since_s
        self._since_s = self._spent_s()

    def _sleep(self, computed_s: float) -> None:
        """Sleeps for what slower computing would have taken more; what was slept too long is taken off the next."""
        self._owed_s += self._excess * computed_s
        began_s = time.perf_counter()
        time.sleep(max(0.0, self._owed_s))
        slept_s = time.perf_counter() - began_s
        self._owed_s -= slept_s
        self.clock.slept_s += slept_s

    def _device_s(self) -> float:
        torch.cuda.synchronize()
        return self.clock.now()

    def _backward_ended_s(self) -> float:
        """When a GPU had the last gradient: what it waits for after that is no computing."""
        return self.clock.read(next(mark for phase, mark, _ in reversed(self._laps.ends) if phase == BACKWARD))


def stopwatch_for(device: torch.device, *, events: bool, factor: float, core_share: float) -> Stopwatch:
    """The stopwatch of a rank that is to be so many times as slow; a plain one for a rank that is not."""
    if factor == 1:
        return make_stopwatch(device, events=events)
    clock = clock_for(device)
    return SlowRankStopwatch(clock, OperationLog(clock) if events else None, factor, core_share)

"""Times the phases of each step: on a CPU by the clock, on a GPU by events that are read later."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

DATA, FORWARD, BACKWARD, UPDATE = range(4)


class PhaseTimes(NamedTuple):
    """When a step began, since the run's start, and how long each phase took, in seconds."""

    start_s: float
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float


class StepClock(ABC):
    """`begin`, then a `lap` at the end of each phase (micro-batches add up), then `end`; `read` when it may wait."""

    @abstractmethod
    def begin(self) -> None:
        """A step starts."""

    @abstractmethod
    def lap(self, phase: int) -> None:
        """A phase ends, and the next one starts."""

    @abstractmethod
    def end(self) -> Any:
        """The step ends; returns what `read` turns into times."""

    @abstractmethod
    def read(self, step: Any) -> PhaseTimes:
        """The times of a step; waits for the device where it has to."""


class HostClock(StepClock):
    """For CPUs, where an operation is done when it returns."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def begin(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps = [0.0, 0.0, 0.0, 0.0]

    def lap(self, phase: int) -> None:
        now = time.perf_counter()
        self._laps[phase] += now - self._last
        self._last = now

    def end(self) -> PhaseTimes:
        return PhaseTimes(self._start - self._origin, *self._laps)

    def read(self, step: PhaseTimes) -> PhaseTimes:
        return step


class CudaClock(StepClock):
    """For GPUs, which work on long after the call has returned."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._origin = self._event()

    def begin(self) -> None:
        self._marks = [(-1, self._event())]

    def lap(self, phase: int) -> None:
        self._marks.append((phase, self._event()))

    def end(self) -> list[tuple[int, torch.cuda.Event]]:
        return self._marks

    def read(self, step: list[tuple[int, torch.cuda.Event]]) -> PhaseTimes:
        step[-1][1].synchronize()
        laps = [0.0, 0.0, 0.0, 0.0]
        for (_, before), (phase, after) in itertools.pairwise(step):
            laps[phase] += before.elapsed_time(after) / 1000
        start_s = self._origin.elapsed_time(step[0][1]) / 1000
        self._free += [event for _, event in step]
        return PhaseTimes(start_s, *laps)

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def step_clock(device: torch.device) -> StepClock:
    """The clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()

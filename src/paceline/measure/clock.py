"""The clock of a run: on a CPU the host's, on a GPU events in its stream, all read as seconds since the run's start."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

Mark = Any
"""A moment that was marked: a number on a CPU, an event on a GPU."""
ClockMoment = tuple[Mark, float]
"""A mark, and the processor time that the computing thread had by then; not a number where another computes."""


class Clock(ABC):
    """`mark` costs a microsecond or so; `read`, later, says when that was, and may have to wait for the device."""

    on_host = True
    """Whether the thread that marks moments also does the computing."""

    def __init__(self) -> None:
        self.origin_s = time.perf_counter()
        """When the run began, by the host's clock."""
        self.slept_s = 0.0
        """What the computing thread slept in place of computing, to be slow on purpose: counts as processor time."""

    def now(self) -> float:
        """Seconds since the run's start, by the host's clock."""
        return time.perf_counter() - self.origin_s

    def start(self, origin_s: float) -> None:
        """Begins the run at a moment of the host's clock, the same on all ranks."""
        self.origin_s = origin_s

    def anchor(self) -> None:  # noqa: B027  (a host's clock needs no comparing)
        """Compares the device's clock with the host's; called when the device has nothing to do."""

    @abstractmethod
    def mark(self) -> Mark:
        """Marks this moment, or, on a GPU, the moment when it has done all that was asked of it until now."""

    @abstractmethod
    def read(self, mark: Mark) -> float:
        """When that was, in seconds since the run's start."""

    def release(self, mark: Mark) -> None:  # noqa: B027  (numbers need no releasing)
        """Says that a mark will not be read again."""

    @abstractmethod
    def moment(self) -> ClockMoment:
        """Marks this moment, with the processor time that this thread has had."""


class HostClock(Clock):
    """For CPUs, where an operation is done when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, mark: float) -> float:
        return mark - self.origin_s

    def moment(self) -> ClockMoment:
        return time.perf_counter(), time.thread_time() + self.slept_s


class CudaClock(Clock):
    """For GPUs, which work on long after the call has returned."""

    on_host = False

    def __init__(self) -> None:
        super().__init__()
        self._free: list[torch.cuda.Event] = []
        self._anchor = torch.cuda.Event(enable_timing=True)
        self.anchor()

    def anchor(self) -> None:
        # Times between events are float32 milliseconds: far from the last anchor they would be coarse.
        self._anchor.record()
        self._anchor.synchronize()
        self._anchored_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def moment(self) -> ClockMoment:
        return self.mark(), float("nan")

    def read(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        since_anchor_s: float = self._anchor.elapsed_time(mark) / 1000
        return self._anchored_s - self.origin_s + since_anchor_s

    def release(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)


def clock_for(device: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()

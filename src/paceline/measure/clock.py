"""Clock of a run: the host's clock on a CPU, events in the stream on a GPU; read as seconds since the run's start."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

Mark = Any
"""A marked time: a number on a CPU, an event on a GPU."""
CpuMark = tuple[Mark, float]
"""A mark, and the CPU time of the compute thread at that time; NaN on a GPU."""


class Clock(ABC):
    """A clock whose `mark` takes about a microsecond; a later `read` returns the time."""

    on_host = True
    """Whether the thread that marks times also computes."""

    def __init__(self) -> None:
        self.origin_s = time.perf_counter()
        """Start of the run, on the host's clock."""
        self.slept_s = 0.0
        """Seconds that the compute thread slept to emulate a slow rank; they count as CPU time."""

    def now(self) -> float:
        """Return the seconds since the run's start, on the host's clock."""
        return time.perf_counter() - self.origin_s

    def set_origin(self, origin_s: float) -> None:
        """Set the start of the run to a time on the host's clock; all ranks set the same time."""
        self.origin_s = origin_s

    def anchor(self) -> None:  # noqa: B027  (the host's clock needs no anchor)
        """Align the device's clock with the host's; call it while the device is idle."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the current time; on a GPU, the time at which it completes all work queued so far."""

    def wait(self, mark: Mark) -> None:  # noqa: B027  (the host's clock has always reached its marks)
        """Wait until the device has reached a mark, and with it all earlier marks of the same stream."""

    def has_reached(self, mark: Mark) -> bool:  # noqa: ARG002  (the host's clock has reached all marks)
        """Return whether the device has reached a mark, without waiting."""
        return True

    @abstractmethod
    def read(self, mark: Mark) -> float:
        """Return the time of a mark that the device has reached, in seconds since the run's start."""

    def release(self, mark: Mark) -> None:  # noqa: B027  (numbers need no releasing)
        """Release a mark that will not be read again."""

    @abstractmethod
    def cpu_mark(self) -> CpuMark:
        """Mark the current time, with the CPU time of this thread."""


class HostClock(Clock):
    """Clock for CPUs, where an operation has completed when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, mark: float) -> float:
        return mark - self.origin_s

    def cpu_mark(self) -> CpuMark:
        return time.perf_counter(), time.thread_time() + self.slept_s


class CudaClock(Clock):
    """Clock for GPUs, where an operation completes after its call has returned."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._streams: dict[int, torch.cuda.Stream] = {}
        """Streams that were current when a time was marked, by their handles."""
        self._free: list[torch.cuda.Event] = []
        self._anchor = torch.cuda.Event(enable_timing=True)
        self.anchor()

    def anchor(self) -> None:
        # Times between events are float32 milliseconds, which become coarse far from the anchor.
        self._anchor.record(self._current_stream())
        self._anchor.synchronize()
        self._anchored_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        try:  # Threads of Gloo mark times too, so a test for events before `pop` could find the last one taken.
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._current_stream())
        return event

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the current stream of the device, by its handle: `torch.cuda.current_stream` looks for GPUs in each
        call and creates an object, which takes the host longer than to record an event.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._device)
        return stream

    def cpu_mark(self) -> CpuMark:
        return self.mark(), float("nan")

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def has_reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def read(self, mark: torch.cuda.Event) -> float:
        since_anchor_s: float = self._anchor.elapsed_time(mark) / 1000
        return self._anchored_s - self.origin_s + since_anchor_s

    def release(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()

"""Profile a range of steps with torch's profiler, and sum the times by operator."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from paceline.records import RunFolder
from paceline.records.profile import Operator, Profile, write_profile
from paceline.records.schema import profile_trace_file

TOP = 40
"""Operators kept by name. A step has about a hundred, most of which take no time."""


class StepProfiler:
    """Profiler for a range of steps of one rank. Profiling slows steps down, so windows end before and after them."""

    def __init__(self, steps: range, folder: RunFolder, rank: int, device: torch.device) -> None:
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._device = device
        self._running: Any = None
        self._started_s = 0.0

    def window_end(self, step: int, end: int) -> int:
        """Return where a window from `step` must end, at most `end`: profiled steps have their own windows."""
        return min([end, *[boundary for boundary in self._boundaries if step < boundary]])

    def distorts(self, start: int, end: int, *, period: int, warm_up: int) -> bool:
        """Return whether the time of a window is not usable.

        It contains profiled steps, starts or ends at a profiling boundary that is not a multiple of `period`, or starts
        at a boundary during the warm-up.
        """
        overlaps = start < self._steps.stop and end > self._steps.start
        cut_off = [boundary for boundary in self._boundaries if boundary in (start, end) and boundary % period]
        return overlaps or bool(cut_off) or (start in self._boundaries and start < warm_up)

    @property
    def is_running(self) -> bool:
        """Whether some of the steps have been profiled, and more follow."""
        return self._running is not None

    def start_if_due(self, step: int) -> None:
        """Start profiling if `step`, the next step to run, is the first one to profile."""
        if step != self._steps.start or self._running is not None:
            return
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # Without `acc_events` torch 2.11 warns that events of earlier cycles are lost; there are none.
        self._running = profile(activities=activities, acc_events=True)
        self._running.start()
        self._started_s = time.perf_counter()

    def stop_if_due(self, step: int) -> None:
        """Stop profiling if `step` steps have completed the range; the device must be idle."""
        if self._running is not None and step >= self._steps.stop:
            self._finish(self._steps.stop)

    def close(self, step: int) -> None:
        """End the run after `step` steps; if they include profiled ones, write their profile."""
        if self._running is not None:
            self._finish(step)

    @property
    def _boundaries(self) -> tuple[int, int]:
        return self._steps.start, self._steps.stop

    def _finish(self, stop: int) -> None:
        wall_s = time.perf_counter() - self._started_s
        self._running.stop()
        profiled, self._running = self._running, None
        steps = stop - self._steps.start
        operators, rest = top_operators(by_operator(profiled, steps))
        found = Profile(self._steps.start, stop - 1, wall_s / steps, operators, rest)
        write_profile(found, self._folder, self._rank)
        final = self._folder.path / profile_trace_file(self._rank)
        temporary = final.with_name(f".{final.name}")
        profiled.export_chrome_trace(str(temporary))
        temporary.replace(final)


OVERHEADS = frozenset(
    {
        "Activity Buffer Request",
        "Buffer Flush",
        "Command Buffer Full",
        "Driver Compiler",
        "Instrumentation",
        "Lazy Function Loading",
        "Resource",
        "Runtime Triggered Module Loading",
    }
)
"""Entries for the overhead of CUPTI and the driver, which include the kernel that waited for it."""


def by_operator(profiled: profile, steps: int) -> list[Operator]:
    """Return the time of each operator per step. GPU time is attributed to the operator that launched the kernel."""
    return [
        Operator(
            name=str(entry.key),
            calls=entry.count / steps,
            self_cpu_s=entry.self_cpu_time_total / steps / 1e6,
            cpu_s=entry.cpu_time_total / steps / 1e6,
            self_device_s=entry.self_device_time_total / steps / 1e6,
            device_s=entry.device_time_total / steps / 1e6,
        )
        for entry in profiled.key_averages()
        # Kernels also have separate entries beside the operators that launched them; those would count twice.
        if entry.device_type == DeviceType.CPU and entry.key not in OVERHEADS
    ]


def top_operators(operators: list[Operator]) -> tuple[list[Operator], Operator | None]:
    """Return the operators with the most time of their own, in decreasing order, and the sum of all others."""
    on_device = any(operator.self_device_s for operator in operators)
    ordered = sorted(operators, key=lambda o: (o.self_device_s if on_device else 0, o.self_cpu_s), reverse=True)
    top, others = ordered[:TOP], ordered[TOP:]
    if not others:
        return top, None
    sums = [sum(values) for values in itertools.islice(zip(*map(_additive_values, others), strict=True), 3)]
    calls, self_cpu_s, self_device_s = sums
    rest = Operator(f"{len(others)} others", calls, self_cpu_s, None, self_device_s, None)
    return top, rest


def _additive_values(operator: Operator) -> tuple[float, float, float]:
    """Return the values that can be summed over operators. Total times cannot: they include called operators."""
    return operator.calls, operator.self_cpu_s, operator.self_device_s

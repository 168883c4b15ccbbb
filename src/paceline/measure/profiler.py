"""Profiles chosen steps with torch's own profiler, and sums them up by operator."""

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
"""Operators that are kept by name; a step has some hundred, most of which take no time."""


class StepProfiler:
    """Profiles a range of steps of one rank. It slows them down, so the windows of a run end before and after them."""

    def __init__(self, steps: range, folder: RunFolder, rank: int, device: torch.device) -> None:
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._device = device
        self._running: Any = None
        self._began_s = 0.0

    def cut(self, step: int, end: int) -> int:
        """Where a window from `step` to `end` has to end already."""
        return min([end, *[cut for cut in self._cuts if step < cut]])

    def disturbs(self, start: int, end: int, *, period: int, warm_up: int) -> bool:
        """Whether the time of a window says nothing: it holds profiled steps, or ends or starts where it should not."""
        overlaps = start < self._steps.stop and end > self._steps.start
        cut_off = [cut for cut in self._cuts if cut in (start, end) and cut % period]
        return overlaps or bool(cut_off) or (start in self._cuts and start < warm_up)

    def before(self, step: int) -> None:
        """Steps from this one on are to come."""
        if step != self._steps.start or self._running is not None:
            return
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # Else torch 2.11 warns that it forgets the events of earlier cycles, of which there are none.
        self._running = profile(activities=activities, acc_events=True)
        self._running.start()
        self._began_s = time.perf_counter()

    def after(self, step: int) -> None:
        """So many steps are done, and the device has nothing left to do."""
        if self._running is not None and step >= self._steps.stop:
            self._finish(self._steps.stop)

    def close(self, step: int) -> None:
        """The run ends after so many steps, maybe in the middle of those that were to be profiled."""
        if self._running is not None:
            self._finish(step)

    @property
    def _cuts(self) -> tuple[int, int]:
        return self._steps.start, self._steps.stop

    def _finish(self, stop: int) -> None:
        wall_s = time.perf_counter() - self._began_s
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
"""What CUPTI says of its own work and the driver's. The kernel that waited for it is charged to these too."""


def by_operator(profiled: profile, steps: int) -> list[Operator]:
    """What each operator took, per step. Work on a GPU is charged to the operator that asked for it."""
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
        # Kernels have entries of their own beside the operators that launched them: they would count twice.
        if entry.device_type == DeviceType.CPU and entry.key not in OVERHEADS
    ]


def top_operators(operators: list[Operator]) -> tuple[list[Operator], Operator | None]:
    """The operators that took most time themselves, most first, and all others as one."""
    on_device = any(operator.self_device_s for operator in operators)
    ordered = sorted(operators, key=lambda o: (o.self_device_s if on_device else 0, o.self_cpu_s), reverse=True)
    top, others = ordered[:TOP], ordered[TOP:]
    if not others:
        return top, None
    sums = [sum(values) for values in itertools.islice(zip(*map(_added, others), strict=True), 3)]
    calls, self_cpu_s, self_device_s = sums
    rest = Operator(f"{len(others)} others", calls, self_cpu_s, None, self_device_s, None)
    return top, rest


def _added(operator: Operator) -> tuple[float, float, float]:
    """What can be added up over operators: one's total is in the total of the one that called it."""
    return operator.calls, operator.self_cpu_s, operator.self_device_s

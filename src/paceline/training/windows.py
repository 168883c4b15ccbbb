"""Cuts a run into windows: after which step one ends, how long it took, what was trained in it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

import torch

from paceline.analysis.steps.timing import WindowTime
from paceline.measure.profiler import StepProfiler
from paceline.training.run_recorder import WriteEvent
from paceline.training.step_recorder import StepRecorder
from paceline.training.sync import Sync

WARM_UP_STEPS = 5
"""The first window: reducers build their buckets, allocators and caches fill. Its time never counts."""
WINDOW_S = 0.5
"""Ranks exchange their losses this often, not more: a message every few short steps would cost more than all else."""
MAX_LOGS_PER_WINDOW = 50
LONG_WINDOW_S, MIN_STEPS = 10.0, 100
"""Where ranks do not step together, they wait for each other at the end of a window alone, by up to a step of the
slowest: these make that a small part of it."""


class Windows:
    """The windows of one run; every rank opens and closes them at the same steps."""

    def __init__(
        self,
        sync: Sync,
        step_recorder: StepRecorder,
        log_every: int,
        write_event: WriteEvent,
        profiler: StepProfiler | None = None,
        seconds: float | None = None,
    ) -> None:
        self.times: list[WindowTime] = []
        """What was timed so far."""
        self.epoch_ends: list[int] = []
        """The steps at which epochs have ended, once a step of the next one is in a window."""
        self._sync = sync
        self._step_recorder = step_recorder
        self._log_every = log_every
        self._write_event = write_event
        self._profiler = profiler
        self._seconds = seconds
        self._logs_per_window = 1
        self._step = 0
        """Steps done before the window that is open."""
        self.open()

    def next_end(self, step: int) -> int:
        """Where the window from this step on ends: after whole periods, and late enough for closing to cost nothing."""
        end = min(self._end_by_periods(step), self._end_by_time(step))
        return end if self._profiler is None else self._profiler.cut(step, end)

    @property
    def time_is_up(self) -> bool:
        """Whether the time of the run is over, as far as whole steps can tell; the same on all ranks."""
        return bool(self.times) and self._left_s < self._last_step_s / 2

    @property
    def _left_s(self) -> float:
        return math.inf if self._seconds is None else self._seconds - sum(window.wall_s for window in self.times)

    @property
    def _last_step_s(self) -> float:
        return self.times[-1].wall_s / self.times[-1].steps

    def _end_by_time(self, step: int) -> int:
        """The step at which the time of the run is over, going by the last window."""
        if not self.times or self._seconds is None:
            return sys.maxsize
        period = self._sync.strategy.period
        return step + max(1, round(self._left_s / self._last_step_s / period)) * period

    def _end_by_periods(self, step: int) -> int:
        period = self._sync.strategy.period
        if step == 0 or (self._profiler is not None and step < self._warm_up):
            return self._warm_up
        if not self._sync.strategy.lockstep:
            return step + max(MIN_STEPS, math.ceil(LONG_WINDOW_S / self.times[-1].wall_s * self.times[-1].steps))
        size = -(-self._log_every * self._logs_per_window // period) * period
        return step + size - step % size

    @property
    def _warm_up(self) -> int:
        """The steps of the first window."""
        period = self._sync.strategy.period
        return -(-WARM_UP_STEPS // period) * period

    def open(self) -> None:
        """The clock starts."""
        if self._profiler is not None:
            self._profiler.before(self._step)
        self._began_s = time.perf_counter()

    def close(self, step: int) -> int:
        """The clock stops when nothing is in flight any more; only then do ranks exchange what they trained.

        Returns the steps trained so far: fewer than asked for where the data has ended.
        """
        self._sync.strategy.finish()
        device = self._sync.comm.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall_s = time.perf_counter() - self._began_s
        if self._sync.comm.stopwatch is not None:
            self._sync.comm.stopwatch.clock.anchor()
        start = self._step
        profiled = self._close_profile(step)
        window = self._step_recorder.close_window(wall_s, self._sync.comm, start, step)
        step = self._step = start + len(window.losses)
        self._track_epoch_ends(start, window.epochs)
        if self._sync.payload is not None:
            self._sync.payload.close_window(len(window.losses), counts=start >= self._warm_up)
        self.times.append(WindowTime(len(window.losses), window.wall_s, profiled))
        if not profiled:
            log_s = window.wall_s * self._log_every / len(window.losses)
            self._logs_per_window = max(1, min(MAX_LOGS_PER_WINDOW, int(WINDOW_S / log_s)))
        self._write_event(
            "log",
            epoch=window.epochs[-1],
            step=step,
            wall_s=window.wall_s,
            losses=window.losses,
            samples=window.samples,
            correct=window.correct,
            **({"epochs": window.epochs} if window.epochs[0] != window.epochs[-1] else {}),
            **({"profiled": True} if profiled else {}),
        )
        return step

    def _track_epoch_ends(self, start: int, epochs: Sequence[int]) -> None:
        for step, epoch in enumerate(epochs, start):
            if epoch > len(self.epoch_ends):
                self.epoch_ends.append(step)

    def finish(self) -> None:
        """The run ends after the last window."""
        if self._profiler is not None:
            self._profiler.close(self._step)

    def _close_profile(self, step: int) -> bool:
        """Ends profiling where that is due; whether the window that ends here has a time that says nothing."""
        start, self._step = self._step, step
        if self._profiler is None:
            return False
        self._profiler.after(step)
        return self._profiler.disturbs(start, step, period=self._sync.strategy.period, warm_up=self._warm_up)

"""Windows of a run: consecutive steps that are timed and logged together."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.analysis.divergence import DivergenceDetector
from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.analysis.steps.timing import WindowTime, WindowTotals
from paceline.measure.profiler import StepProfiler
from paceline.records.events import LogEvent
from paceline.training.recording.history import Resumed, TrainedTotals
from paceline.training.recording.run_recorder import WriteEvent
from paceline.training.recording.step_recorder import StepRecorder
from paceline.training.sync import Sync

WINDOW_S = 0.5
"""Target length of a window: ranks exchange losses once per window, and doing so more often would slow short steps."""
MAX_LOGS_PER_WINDOW = 50
UNKNOWN_RATE = -1.0
"""Lower than any learning rate, so that the largest over the ranks is a known one."""
LONG_WINDOW_S, MIN_STEPS = 10.0, 100
"""Minimum length if ranks do not step together. They wait for each other only at the end of a window, up to one step of
the slowest; in windows of this length that wait is a small part."""


@dataclass(frozen=True)
class Boundaries:
    """Times at which something happens between two windows: evaluations and checkpoints."""

    steps: tuple[int, ...] = ()
    """Numbers of steps of whose multiples windows end at each."""
    seconds: float | None = None
    """Seconds of training of whose multiples windows end at each, to the nearest step."""

    @property
    def divides(self) -> bool:
        """Whether they may divide the warm-up of a run into several windows."""
        return bool(self.steps) or self.seconds is not None


NO_BOUNDARIES = Boundaries()


class Windows:
    """Windows of one run; every rank opens and closes them at the same steps."""

    def __init__(
        self,
        sync: Sync,
        step_recorder: StepRecorder,
        log_every: int,
        write_event: WriteEvent,
        profiler: StepProfiler | None = None,
        seconds: float | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
        resumed: Resumed | None = None,
    ) -> None:
        """Make the windows of a run that ends after `seconds`, and that may have `resumed`.

        Windows end at the `boundaries`.
        """
        self.totals = WindowTotals()
        """Sums over the closed windows."""
        self.epoch_ends: list[int] = []
        """Steps at which epochs have ended, known once a step of the next epoch is in a window."""
        self.divergence = DivergenceDetector()
        """Divergence of the loss over all ranks; the same on each."""
        self.trained = TrainedTotals()
        """Sums over all samples of the whole run."""
        self._sync = sync
        self._step_recorder = step_recorder
        self._log_every = log_every
        self._write_event = write_event
        self._profiler = profiler
        self._seconds = seconds
        self._boundaries = boundaries
        self._logs_per_window = 1
        self._rates: dict[int, float] = {}
        """Learning rate of the steps of the open window that this rank trains, as far as the loop reports it."""
        self.epoch = 0
        """Epoch of the last step before the open window."""
        self._step = 0
        """Steps before the open window."""
        self.first_step = 0
        """Step at which the run started or resumed."""
        if resumed is not None:
            self._resume(resumed)
        self.open()

    def _resume(self, resumed: Resumed) -> None:
        recorded = resumed.recorded
        self.first_step = self._step = resumed.step
        self.epoch, self.epoch_ends, self.trained = resumed.epoch, list(resumed.epoch_ends), resumed.totals
        self.totals.resume(recorded.windows, steps=resumed.step, wall_s=resumed.totals.train_s)
        losses = [math.nan] * (resumed.step - len(recorded.losses)) + [
            math.nan if loss is None else loss for loss in recorded.losses
        ]
        # A run diverges at its first loss that is not finite, so those of a checkpoint were skipped or not reported.
        unknown = {step for step, loss in enumerate(losses) if math.isnan(loss)}
        self.divergence.add(losses, skipped=frozenset(recorded.skipped), unreported=unknown)

    def next_end(self, step: int, total: int | None = None) -> int:
        """Return the end of the window that starts at `step`: whole periods, long enough to make closing cheap.

        `total` are the steps of a run whose ranks do not step together: they would mostly wait in a short last window,
        so the one before it goes on to the end of the run, unless something is due in between.
        """
        end = min(self._end_by_periods(step), self._end_by_time(step))
        if total is not None and total - end < (end - step) / 2:
            end = total
        end = min(end, self._end_by_boundary(step))
        return end if self._profiler is None else self._profiler.window_end(step, end)

    @property
    def time_is_up(self) -> bool:
        """Whether the run's time is up, to the nearest step; the same on all ranks."""
        return self.totals.last is not None and self._left_s < self.totals.last.step_s / 2

    @property
    def _left_s(self) -> float:
        return math.inf if self._seconds is None else self._seconds - self.totals.wall_s

    def _end_by_time(self, step: int) -> int:
        """Return the step at which the run's time is up, estimated from the last window."""
        if self.totals.last is None or self._seconds is None:
            return sys.maxsize
        period = self._sync.strategy.period
        return step + max(1, round(self._left_s / self.totals.last.step_s / period)) * period

    def _end_by_boundary(self, step: int) -> int:
        """Return the step of the next evaluation or checkpoint, so that its time is in no window; a whole period."""
        period = self._sync.strategy.period
        ends = [step + every - step % every for every in self._boundaries.steps]
        if self._boundaries.seconds is not None and self.totals.last is not None:
            left_s = self._boundaries.seconds - self.totals.wall_s % self._boundaries.seconds
            ends.append(step + max(1, round(left_s / self.totals.last.step_s)))
        return min((-(-end // period) * period for end in ends), default=sys.maxsize)

    @property
    def is_profiling(self) -> bool:
        """Whether the next step is profiled with the one before it, so that nothing else may happen between them."""
        return self._profiler is not None and self._profiler.is_running

    def expected_end(self, step: int) -> int:
        """Return the step at which the run's time will be up, by the median of the windows so far; 2 × `step` at first.

        It changes only when a window closes, so it is the same on all ranks.
        """
        last = self.totals.last
        if last is None:
            return 2 * (step + 1)
        return self._step + max(1, round(self._left_s / (self.totals.step_s or last.step_s)))

    def _end_by_periods(self, step: int) -> int:
        period = self._sync.strategy.period
        last = self.totals.last
        divided = self._profiler is not None or self._boundaries.divides
        if last is None or step == self.first_step or (divided and step < self._warm_up_end):
            return self._warm_up_end
        if not self._sync.strategy.lockstep:
            return step + max(MIN_STEPS, math.ceil(LONG_WINDOW_S / last.wall_s * last.steps))
        size = -(-self._log_every * self._logs_per_window // period) * period
        return step + size - step % size

    @property
    def _warm_up_end(self) -> int:
        """Step at which the first window ends: after so many steps from the start, or from where the run resumed."""
        period = self._sync.strategy.period
        return -(-(self.first_step + WARM_UP_STEPS) // period) * period

    def open(self) -> None:
        """Start the clock."""
        if self._profiler is not None:
            self._profiler.start_if_due(self._step)
        self._began_s = time.perf_counter()

    def note_learning_rate(self, step: int) -> None:
        """Keep the learning rate of a step that begins; `step` is its number over all ranks, counted from 0."""
        rate = self._sync.optimizer.param_groups[0]["lr"]
        if isinstance(rate, float):  # Reading a tensor would make every step wait for a GPU.
            self._rates[step] = rate

    def close(self, step: int) -> int:
        """Wait for operations in flight, stop the clock, then sum the window's figures over the ranks.

        The replicas are compared last, if it is time to, so that no window's time contains it.

        Return the number of steps trained so far, which is less than `step` if the data has ended.
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
        window = self._step_recorder.close_window(wall_s, self._sync.comm.control, start, step, profiled=profiled)
        step = self._step = start + len(window.losses)
        self._track_epoch_ends(start, window.epochs)
        self.divergence.add(window.losses, skipped=window.skipped, unreported=window.unreported)
        if self._sync.payload is not None:
            self._sync.payload.close_window(len(window.losses), counts=start >= self._warm_up_end)
        self.trained.add(
            samples=window.samples,
            loss_sum=window.loss_sum,
            with_loss=window.with_loss,
            correct=window.correct,
            wall_s=window.wall_s,
        )
        divided = self._boundaries.divides or self.first_step > 0
        warm_up = divided and 0 < start < self._warm_up_end
        self.totals.add(WindowTime(len(window.losses), window.wall_s, profiled, warm_up))
        self.epoch = window.epochs[-1]
        if not profiled:
            log_s = window.wall_s * self._log_every / len(window.losses)
            self._logs_per_window = max(1, min(MAX_LOGS_PER_WINDOW, int(WINDOW_S / log_s)))
        self._sync.noise.adapt(window.noise, window.wall_s, len(window.losses))
        rates = self._rates_of(range(start, step))
        event = LogEvent(
            epoch=window.epochs[-1],
            step=step,
            wall_s=window.wall_s,
            losses=list(window.losses),
            samples=window.samples,
            correct=window.correct,
            epochs=window.epochs if window.epochs[0] != window.epochs[-1] else None,
            profiled=profiled,
            warm_up=warm_up,
            lr=rates[-1] if rates else float(self._sync.optimizer.param_groups[0]["lr"]),
            skipped=window.skipped,
            lrs=(rates if len(set(rates)) > 1 else rates[:1]) or None,
            noise=window.noise,
        )
        self._write_event(event)
        if self._sync.guard is not None:
            self._sync.guard.at_window_end(self.totals.wall_s)
        return step

    def _rates_of(self, steps: range) -> list[float]:
        """Return the learning rate of each step of the closing window; empty if that of a step is unknown.

        If ranks do not step together, each trains only some of the steps, so they exchange theirs. All compute the rate
        from the number of the step, so that of one rank is that of all.
        """
        own, self._rates = [self._rates.get(step, UNKNOWN_RATE) for step in steps], {}
        if not self._sync.strategy.lockstep:
            own = self._sync.comm.control.largest_of(torch.tensor(own, dtype=torch.float64)).tolist()
        return [] if UNKNOWN_RATE in own else own

    def _track_epoch_ends(self, start: int, epochs: Sequence[int]) -> None:
        for step, epoch in enumerate(epochs, start):
            if epoch > len(self.epoch_ends):
                self.epoch_ends.append(step)

    def finish(self) -> None:
        """End the profile, if one is open, after the last window."""
        if self._profiler is not None:
            self._profiler.close(self._step)

    def _close_profile(self, step: int) -> bool:
        """End profiling if it is due; return whether profiling makes the time of the closing window unusable."""
        start, self._step = self._step, step
        if self._profiler is None:
            return False
        self._profiler.stop_if_due(step)
        return self._profiler.distorts(start, step, period=self._sync.strategy.period, warm_up=self._warm_up_end)

"""Time the phases of each step, and separate compute from waiting in backward."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.measure.clock import Clock, CpuMark, Mark, clock_for
from paceline.measure.last_gradient import LastGradient
from paceline.measure.operations import OperationLog
from paceline.records.timeline import NO_PEER, NOT_MEASURED, Purpose, RowKind

DATA, FORWARD, BACKWARD, AFTER_BACKWARD, AGREE, OPTIMISER = range(6)
"""The phases of a step. `AFTER_BACKWARD` lasts from the last gradient until `backward()` returns (DDP waits there),
`AGREE` from there until the optimiser starts."""

COLUMNS = {DATA: 0, FORWARD: 1, BACKWARD: 2, AFTER_BACKWARD: 2, AGREE: 3, OPTIMISER: 3}
"""Duration in `PhaseTimes` that a phase's time is added to, counted from `data_s`."""
KINDS = {DATA: RowKind.DATA, FORWARD: RowKind.FORWARD, BACKWARD: RowKind.BACKWARD, OPTIMISER: RowKind.OPTIMISER}
"""Phases that have rows in a timeline."""

PHASES_AFTER = {
    None: "loading data",
    DATA: "in the forward pass",
    FORWARD: "in the backward pass",
    BACKWARD: "synchronising gradients",
    AFTER_BACKWARD: "synchronising gradients",
    AGREE: "in the optimiser",
}
"""Activity of a rank after each phase of a step, in words."""

TimelineRow = tuple[Any, ...]


class PhaseTimes(NamedTuple):
    """Start of a step since the run's start, and durations of its phases, in seconds."""

    start_s: float
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float


@dataclass(slots=True)
class Laps:
    """Marks of one step: its start and the end of each phase."""

    step: int
    start: Mark
    start_cpu_s: float
    ends: list[tuple[int, Mark, float]]
    """Phase, mark of its end, and CPU time of the compute thread at that time."""
    is_recorded: bool = False
    """Whether it is part of the timeline."""
    is_detailed: bool = False
    """Whether it has the marks that only a timeline needs: the last gradient, and the start of the optimiser."""


class Stopwatch:
    """Stopwatch of steps: `begin`, a `lap` at the end of each phase (micro-batches add up), `end`, and later `read`.

    With an operation log it also records CPU times, and the phases that only a timeline needs. On a GPU, where marks
    and hooks are expensive, it does so only in steps that the timeline contains.
    """

    needs_details = False
    """Whether every step needs all marks, also on a GPU."""

    def __init__(self, clock: Clock, operations: OperationLog | None = None) -> None:
        self.clock = clock
        self.operations = operations
        self._now = self._mark_only if operations is None else clock.cpu_mark
        self.next_step = 0
        """Number of the next step. Timelines keep fewer of the later steps."""
        self._parameters: list[Tensor] = []
        self._gradients: LastGradient | None = None
        self._backward_done: CpuMark | None = None
        self._thread = threading.get_ident()
        self._laps = Laps(-1, None, NOT_MEASURED, [])
        self.is_sleeping = False
        """Whether the rank sleeps in order to emulate a slow one."""

    @property
    def changes(self) -> tuple[int, int]:
        """Values that change with each phase of a step, for the watchdog."""
        return self.next_step, len(self._laps.ends)

    @property
    def phase(self) -> str:
        """Current phase, in words, for another thread; empty between steps."""
        laps = self._laps
        if laps.step != self.next_step:
            return ""
        return PHASES_AFTER.get(laps.ends[-1][0] if laps.ends else None, "between steps")

    def begin(self) -> None:
        """Start a step."""
        is_recorded = is_detailed = False
        if self.operations is not None:
            is_recorded = self.operations.begin_step(self.next_step)
            is_detailed = is_recorded or self.clock.on_host or self.needs_details
        self._thread = threading.get_ident()
        self._laps = Laps(self.next_step, *self._now(), [], is_recorded, is_detailed)

    def lap(self, phase: int) -> None:
        """End a phase, and start the next one."""
        if phase == BACKWARD and self.operations is not None and self._laps.is_detailed:
            self.operations.poll()
            last_gradient = self._last_gradient(self.operations)
            if last_gradient is not None:
                self._laps.ends.append((BACKWARD, *last_gradient))
                phase = AFTER_BACKWARD
        elif phase == OPTIMISER and self._waits_for_optimiser:
            phase = AGREE  # The strategy defers the optimiser, or another rank runs it.
        self._laps.ends.append((phase, *self._now()))

    def watch_gradients(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Record when the last gradient of these parameters is ready in each backward pass; return a function to stop.

        On a GPU `watch_backward` does this instead: only the streams know the time.
        """
        if self.operations is not None and self.clock.on_host:
            self._parameters = list(parameters)
        return self._stop_watching

    def watch_backward(self, root: Tensor) -> None:
        """Record when the last gradient is ready in the backward pass from this tensor, on a GPU."""
        if self._laps.is_detailed and not self.clock.on_host and root.requires_grad:
            root.register_hook(self._on_backward_start)

    def mark_agreed(self) -> None:
        """Record that the gradients are synchronised and the optimiser starts.

        Only the first call after a step's last backward pass has an effect, and only on the compute thread: another
        thread may run an optimiser for other ranks.
        """
        if threading.get_ident() == self._thread and self._waits_for_optimiser:
            self.lap(AGREE)

    def end(self) -> Laps:
        """End the step, and return its marks for `read`."""
        self.next_step += 1
        if self.operations is not None:
            self.operations.end_step()
        return self._laps

    def drop(self) -> None:
        """Cancel the current step."""
        if self.operations is not None:
            self.operations.drop_step()

    def count_ended(self, steps: Sequence[Laps]) -> int:
        """Return how many of the first of these steps, in the order of training, the device has completed."""
        return bisect_left(steps, True, key=lambda laps: not self.clock.has_reached(_last_mark(laps)))

    def read_all(self, steps: Sequence[Laps]) -> list[tuple[PhaseTimes, list[TimelineRow]]]:
        """Return the times and the timeline rows of steps, in the order of training; on a GPU, wait for the last."""
        if steps:
            self.clock.wait(_last_mark(steps[-1]))
        return [self._read(laps) for laps in steps]

    def read(self, laps: Laps) -> tuple[PhaseTimes, list[TimelineRow]]:
        """Return the times of a step and its timeline rows; on a GPU, wait for its end."""
        return self.read_all([laps])[0]

    def _read(self, laps: Laps) -> tuple[PhaseTimes, list[TimelineRow]]:
        start_s = before_s = self.clock.read(laps.start)
        self.clock.release(laps.start)
        totals, rows, cpu_before_s = [0.0] * 4, list[TimelineRow](), laps.start_cpu_s
        for phase, mark, cpu_s in laps.ends:
            after_s = self.clock.read(mark)
            self.clock.release(mark)
            totals[COLUMNS[phase]] += after_s - before_s
            if phase in KINDS:
                rows.append(_row(laps.step, KINDS[phase], before_s, after_s, cpu_s - cpu_before_s))
            before_s, cpu_before_s = after_s, cpu_s
        times = PhaseTimes(start_s, *totals)
        if not laps.is_recorded:
            return times, []
        return times, [_row(laps.step, RowKind.STEP, start_s, before_s, NOT_MEASURED), *rows]

    @property
    def _waits_for_optimiser(self) -> bool:
        """Whether the step's last backward pass has ended and the optimiser has not started since."""
        if not self._laps.is_detailed or not self._laps.ends:
            return False
        return self._laps.ends[-1][0] in (BACKWARD, AFTER_BACKWARD)

    def _last_gradient(self, log: OperationLog) -> CpuMark | None:
        """Return when the last gradient of a backward pass was ready; None if that was the end of the pass.

        The two differ only where the autograd engine waits inside the pass for asynchronous operations. An operation
        that the engine started itself was started when its gradients were ready. If DDP communication hooks start the
        operations instead, the gradients are watched from the next pass on, which costs more.
        """
        if not self.clock.on_host:
            done, self._backward_done = self._backward_done, None
            return done
        engine_start = log.take_engine_start()
        if self._gradients is not None:
            last: CpuMark | None = self._gradients.take()
            return last
        if log.has_async_operations and self._parameters:
            self._gradients = LastGradient(self._parameters, self._now)
        last_mark = self._laps.ends[-1][1] if self._laps.ends else self._laps.start
        return engine_start if engine_start is not None and engine_start[0] > last_mark else None

    def _stop_watching(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._parameters, self._gradients = [], None

    def _mark_only(self) -> CpuMark:
        return self.clock.mark(), NOT_MEASURED

    def _on_backward_start(self, _: Tensor) -> None:
        # Final callbacks run in the order in which they were queued: this one, then DDP's, which waits for its buckets.
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_done)

    def _on_backward_done(self) -> None:
        self._backward_done = self._now()


def make_stopwatch(device: torch.device, *, events: bool) -> Stopwatch:
    """Return the stopwatch for a device; with `events` it also records what a timeline needs."""
    clock = clock_for(device)
    return Stopwatch(clock, OperationLog(clock) if events else None)


def _last_mark(laps: Laps) -> Mark:
    return laps.ends[-1][1] if laps.ends else laps.start


def _row(step: int, kind: RowKind, start_s: float, end_s: float, cpu_s: float) -> TimelineRow:
    return step, kind, Purpose.NOTHING, NO_PEER, 0, start_s, end_s, NOT_MEASURED, cpu_s

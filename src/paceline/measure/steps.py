"""Times the phases of each step, and tells where backward's computing ended and its waiting began."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.measure.clock import Clock, ClockMoment, Mark, clock_for
from paceline.measure.last_gradient import LastGradient
from paceline.measure.operations import OperationLog
from paceline.records.timeline import NO_PEER, NOT_MEASURED, Purpose, RowKind, is_recorded

DATA, FORWARD, BACKWARD, AFTER_BACKWARD, AGREE, OPTIMISER = range(6)
"""The phases of a step. `AFTER_BACKWARD` lasts from the last gradient until `backward()` returns (DDP waits there),
`AGREE` from there until the optimiser starts."""

COLUMNS = {DATA: 0, FORWARD: 1, BACKWARD: 2, AFTER_BACKWARD: 2, AGREE: 3, OPTIMISER: 3}
"""Where a phase's time goes in `PhaseTimes`."""
KINDS = {DATA: RowKind.DATA, FORWARD: RowKind.FORWARD, BACKWARD: RowKind.BACKWARD, OPTIMISER: RowKind.OPTIMISER}
"""The phases that a timeline has."""

TimelineRow = tuple[Any, ...]


class PhaseTimes(NamedTuple):
    """When a step began, since the run's start, and how long each phase took, in seconds."""

    start_s: float
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float


@dataclass(slots=True)
class Laps:
    """A step as it was timed: the moments at which phases ended."""

    step: int
    start: Mark
    start_cpu_s: float
    ends: list[tuple[int, Mark, float]]
    """Phase, moment, and the computing thread's processor time by then."""


class Stopwatch:
    """`begin`, then a `lap` at the end of each phase (micro-batches add up), then `end`; `read` when it may wait.

    With a log of operations it also tells phases apart that only a timeline needs, and processor from wall time.
    """

    def __init__(self, clock: Clock, operations: OperationLog | None = None) -> None:
        self.clock = clock
        self.operations = operations
        self._now = self._mark_only if operations is None else clock.moment
        self.next_step = 0
        """The number of the step that begins next; the timeline of a run is thinner where it is high."""
        self._parameters: list[Tensor] = []
        self._gradients: LastGradient | None = None
        self._backward_done: ClockMoment | None = None
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """A step starts."""
        if self.operations is not None:
            self.operations.begin_step(self.next_step)
        self._thread = threading.get_ident()
        self._laps = Laps(self.next_step, *self._now(), [])

    def lap(self, phase: int) -> None:
        """A phase ends, and the next one starts."""
        if phase == BACKWARD and self.operations is not None:
            self.operations.look()
            last_gradient = self._last_gradient(self.operations)
            if last_gradient is not None:
                self._laps.ends.append((BACKWARD, *last_gradient))
                phase = AFTER_BACKWARD
        self._laps.ends.append((phase, *self._now()))

    def watch_gradients(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Has the moment noted at which the last of their gradients is there, until what it returns is called.

        On a GPU `watch_backward` does it: there only its streams tell when that is.
        """
        if self.operations is not None and self.clock.on_host:
            self._parameters = list(parameters)
        return self._stop_watching

    def watch_backward(self, root: Tensor) -> None:
        """Has the same noted in a backward pass from this tensor, on a GPU."""
        if self.operations is not None and not self.clock.on_host and root.requires_grad:
            root.register_hook(self._backward_starts)

    def agreed(self) -> None:
        """Ranks have agreed; the optimiser starts. Only the first call after a step's last backward pass is heard, and
        only from the thread that computes: another may step for other ranks."""
        if threading.get_ident() != self._thread:
            return
        if self.operations is not None and self._laps.ends and self._laps.ends[-1][0] in (BACKWARD, AFTER_BACKWARD):
            self.lap(AGREE)

    def end(self) -> Laps:
        """The step ends; returns what `read` turns into times."""
        self.next_step += 1
        if self.operations is not None:
            self.operations.end_step()
        return self._laps

    def drop(self) -> None:
        """The step that has begun does not take place."""
        if self.operations is not None:
            self.operations.drop_step()

    def read(self, laps: Laps) -> tuple[PhaseTimes, list[TimelineRow]]:
        """The times of a step, and its rows for a timeline; waits for the device where it has to."""
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
        if self.operations is None or not is_recorded(laps.step):
            return times, []
        return times, [_row(laps.step, RowKind.STEP, start_s, before_s, NOT_MEASURED), *rows]

    def _last_gradient(self, log: OperationLog) -> ClockMoment | None:
        """When the last gradient of a backward pass was there; None where it was when the pass had ended.

        Only the engine waits inside a pass where we cannot see it, for operations that were left to end on their own.
        Those that it has started itself, it has started when it had the gradients. Others may have been started by
        hooks of DDP; then the gradients are watched, which costs more, from the next pass on.
        """
        if not self.clock.on_host:
            moment, self._backward_done = self._backward_done, None
            return moment
        sent = log.take_engine_sent()
        if self._gradients is not None:
            last: ClockMoment | None = self._gradients.take()
            return last
        if log.left_open and self._parameters:
            self._gradients = LastGradient(self._parameters, self._now)
        if sent is not None and sent[0] > (self._laps.ends[-1][1] if self._laps.ends else self._laps.start):
            return sent
        return None

    def _stop_watching(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._parameters, self._gradients = [], None

    def _mark_only(self) -> ClockMoment:
        return self.clock.mark(), NOT_MEASURED

    def _backward_starts(self, _: Tensor) -> None:
        # Final callbacks run in the order in which they were queued: ours, then DDP's, which waits for its buckets.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_done)

    def _backward_is_done(self) -> None:
        self._backward_done = self._now()


def make_stopwatch(device: torch.device, *, events: bool) -> Stopwatch:
    """The stopwatch for a device; with events it also notes what a timeline needs."""
    clock = clock_for(device)
    return Stopwatch(clock, OperationLog(clock) if events else None)


def _row(step: int, kind: RowKind, start_s: float, end_s: float, cpu_s: float) -> TimelineRow:
    return step, kind, Purpose.NOTHING, NO_PEER, 0, start_s, end_s, NOT_MEASURED, cpu_s

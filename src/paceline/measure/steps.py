"""Times the phases of each step, and tells where backward's computing ended and its waiting began."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.measure.clock import Clock, Mark, clock_for
from paceline.measure.gradients import LastGradient
from paceline.measure.operations import OperationLog
from paceline.records.timeline import NEVER, NO_PEER, Kind, Purpose, keeps

DATA, FORWARD, BACKWARD, AFTER_BACKWARD, AGREE, OPTIMISER = range(6)
"""The phases of a step. `AFTER_BACKWARD` lasts from the last gradient until `backward()` returns (DDP waits there),
`AGREE` from there until the optimiser starts."""

COLUMNS = {DATA: 0, FORWARD: 1, BACKWARD: 2, AFTER_BACKWARD: 2, AGREE: 3, OPTIMISER: 3}
"""Where a phase's time goes in `PhaseTimes`."""
KINDS = {DATA: Kind.DATA, FORWARD: Kind.FORWARD, BACKWARD: Kind.BACKWARD, OPTIMISER: Kind.OPTIMISER}
"""The phases that a timeline has."""

Row = tuple[Any, ...]
Moment = tuple[Mark, float]
"""A mark, and the processor time that the computing thread had by then."""


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
        self.next_step = 0
        """The number of the step that begins next; the timeline of a run is thinner where it is high."""
        self._gradients: LastGradient | None = None
        self._backward_done: Moment | None = None

    def begin(self) -> None:
        """A step starts."""
        if self.operations is not None:
            self.operations.begin_step(self.next_step)
        self._laps = Laps(self.next_step, self.clock.mark(), self._cpu_s(), [])

    def lap(self, phase: int) -> None:
        """A phase ends, and the next one starts."""
        if phase == BACKWARD and self.operations is not None:
            self.operations.look()
            last_gradient = self._take_last_gradient()
            if last_gradient is not None:
                self._laps.ends.append((BACKWARD, *last_gradient))
                phase = AFTER_BACKWARD
        self._laps.ends.append((phase, *self._now()))

    def watch_gradients(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Has the moment noted at which the last gradient is there, until what it returns is called.

        On a GPU `watch_backward` does it: there only its streams tell when that is.
        """
        if self.operations is None or not self.clock.on_host:
            return lambda: None
        self._gradients = LastGradient(parameters, self._now)
        return self._gradients.close

    def watch_backward(self, root: Tensor) -> None:
        """Has the same noted in a backward pass from this tensor, on a GPU."""
        if self.operations is not None and not self.clock.on_host and root.requires_grad:
            root.register_hook(self._backward_starts)

    def agreed(self) -> None:
        """Ranks have agreed; the optimiser starts."""
        if self.operations is not None:
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
            self.operations.end_step()

    def read(self, laps: Laps) -> tuple[PhaseTimes, list[Row]]:
        """The times of a step, and its rows for a timeline; waits for the device where it has to."""
        start_s = before_s = self.clock.read(laps.start)
        self.clock.release(laps.start)
        totals, rows, cpu_before_s = [0.0] * 4, list[Row](), laps.start_cpu_s
        for phase, mark, cpu_s in laps.ends:
            after_s = self.clock.read(mark)
            self.clock.release(mark)
            totals[COLUMNS[phase]] += after_s - before_s
            if phase in KINDS:
                rows.append(_row(laps.step, KINDS[phase], before_s, after_s, cpu_s - cpu_before_s))
            before_s, cpu_before_s = after_s, cpu_s
        times = PhaseTimes(start_s, *totals)
        if self.operations is None or not keeps(laps.step):
            return times, []
        return times, [_row(laps.step, Kind.STEP, start_s, before_s, NEVER), *rows]

    def _take_last_gradient(self) -> Moment | None:
        if self._gradients is not None:
            moment: Moment | None = self._gradients.take()
        else:
            moment, self._backward_done = self._backward_done, None
        return moment

    def _now(self) -> Moment:
        return self.clock.mark(), self._cpu_s()

    def _cpu_s(self) -> float:
        """What the computing thread has had; not a number on a GPU, where another processor computes."""
        return NEVER if self.operations is None or not self.clock.on_host else time.thread_time()

    def _backward_starts(self, _: Tensor) -> None:
        # Final callbacks run in the order in which they were queued: ours, then DDP's, which waits for its buckets.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_done)

    def _backward_is_done(self) -> None:
        self._backward_done = self._now()


def make_stopwatch(device: torch.device, *, events: bool) -> Stopwatch:
    """The stopwatch for a device; with events it also notes what a timeline needs."""
    clock = clock_for(device)
    return Stopwatch(clock, OperationLog(clock) if events else None)


def _row(step: int, kind: Kind, start_s: float, end_s: float, cpu_s: float) -> Row:
    return step, kind, Purpose.NOTHING, NO_PEER, 0, start_s, end_s, NEVER, cpu_s

"""Log of communication operations: kind, bytes, purpose, start, end, and since when the compute thread waited.

Operations of recorded steps are kept for the timeline. All others are only known while they are in progress, for the
watchdog, which reports what a rank waits in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.measure.clock import Clock, CpuMark, Mark
from paceline.records.timeline import MESSAGES, NOT_MEASURED, Purpose, RecordedSteps, RowKind, sampled_steps

SMALL_BYTES = 2**20
"""Size that takes at most about 0.1 ms to copy."""

MOST_OPEN = 1000
"""Most operations that count as being in progress; more have been started and never waited for."""


class ActiveOperation:
    """An operation in progress."""

    __slots__ = (
        "bytes",
        "end",
        "has_ended",
        "is_kept",
        "kind",
        "members",
        "number",
        "peer",
        "purpose",
        "start",
        "step",
        "waited_from",
    )

    def __init__(
        self,
        step: int,
        kind: RowKind,
        purpose: Purpose,
        size: int,
        peer: int,
        start: Mark,
        is_kept: bool,
        number: int,
        members: Sequence[int],
    ) -> None:
        self.step = step
        self.kind = kind
        self.purpose = purpose
        self.bytes = size
        self.peer = peer
        self.start = start
        self.is_kept = is_kept
        """Whether it is a row of the timeline; if not, its times are not measured."""
        self.number = number
        """Number of gradient operations that the step has started before it."""
        self.members = members
        """Ranks that take part; empty for all workers."""
        self.has_ended: Callable[[], bool] | None = None
        """Returns whether it has ended, if its end is reported late or not at all."""
        self.end: Mark = None
        self.waited_from: Mark = None
        """Time from which the compute thread waited; `start` itself if it did not continue after the start."""


class _ThreadContext(threading.local):
    """Attributes of the operations that a thread starts."""

    purpose = Purpose.GRADIENTS
    step: int | None = None
    """Step that its operations belong to; None for the current step."""


class OperationLog:
    """Operations of one rank. Threads other than the compute thread may also start and end them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.recorded_steps = RecordedSteps() if clock.on_host else sampled_steps()
        """Steps whose operations are kept. On a GPU a sample: events cost 12% of the CPU time of a short step there."""
        self._step = 0
        self._keeping = False
        self._context = _ThreadContext()
        self._idle_since: Mark = None
        self._done: deque[ActiveOperation] = deque()  # Other threads append to it while it is emptied.
        self._polled: list[ActiveOperation] = []
        self._open: dict[ActiveOperation, None] = {}
        """Operations in progress, in the order of their start."""
        self._gradient_operations = 0
        self.changes = 0
        """Number of starts and ends of operations, for the watchdog."""
        self._ending = threading.Lock()
        self._computing_thread = threading.get_ident()
        self._engine_count = self._engine_count_before = 0
        self._engine_start: CpuMark | None = None
        self.has_async_operations = False
        """Whether Python code, such as a DDP communication hook, has started an asynchronous operation."""

    def sample_periods(self, period: int) -> None:
        """Make sampled blocks whole periods of a strategy, in number of steps; without effect if none are sampled."""
        if not self._clock.on_host:
            self.recorded_steps = sampled_steps(period)

    def begin_step(self, step: int) -> bool:
        """Start a step, computed by this thread; operations that start from here on belong to it.

        Return whether the step is recorded.
        """
        self._step, self._keeping = step, step in self.recorded_steps
        self._computing_thread = threading.get_ident()
        self._engine_count_before, self._engine_count = self._engine_count, 0
        self._gradient_operations = 0
        if self._open:
            self._forget(self._is_over)
        return self._keeping

    def end_step(self) -> None:
        """End the step; operations that start from here on belong to no step."""
        self._keeping = False

    def drop_step(self) -> None:
        """Cancel the current step and discard its operations."""
        with self._ending:
            kept = [operation for operation in self._done if operation.step != self._step]
            self._done.clear()
            self._done.extend(kept)
        self.end_step()

    @contextmanager
    def carrying(self, purpose: Purpose) -> Iterator[None]:
        """Record what operations of this thread carry inside the `with` block; by default they carry gradients."""
        before, self._context.purpose = self._context.purpose, purpose
        try:
            yield
        finally:
            self._context.purpose = before

    @property
    def step(self) -> int:
        """Number of the current step, or of the last one between steps."""
        return self._step

    @contextmanager
    def on_behalf_of(self, step: int) -> Iterator[None]:
        """Attribute operations that this thread starts inside the `with` block to a step, which may have ended."""
        self._context.step = step
        try:
            yield
        finally:
            self._context.step = None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Record that the compute thread only waits inside the `with` block, for operations that another thread starts.

        Operations that end inside the block were waited for; those that end after it were not.
        """
        if not self._clock.on_host:
            yield
            return
        self._idle_since = self._clock.mark()
        try:
            yield
        finally:
            self._idle_since = None

    def start(
        self, kind: RowKind, size: int, peer: int, *, blocking: bool = False, members: Sequence[int] = ()
    ) -> ActiveOperation:
        """Record the start of an operation of `members`, by default of all workers; `blocking` if this thread waits."""
        context = self._context
        step, purpose, number = context.step, context.purpose, self._gradient_operations
        if step is None:
            step, is_kept = self._step, self._keeping
        else:
            is_kept = step in self.recorded_steps
        if purpose is Purpose.GRADIENTS:
            self._gradient_operations = number + 1
        start = self._clock.mark() if is_kept else None
        operation = ActiveOperation(step, kind, purpose, size, peer, start, is_kept, number, members)
        if blocking and is_kept and self._computes_here():
            operation.waited_from = start
        self._open[operation] = None
        if len(self._open) > MOST_OPEN:
            self._forget(lambda _: True)
        self.changes += 1
        return operation

    def mark_waiting(self, operation: ActiveOperation) -> None:
        """Record that this thread starts to wait for the end of an operation."""
        if operation.is_kept and operation.waited_from is None and operation.end is None and self._computes_here():
            operation.waited_from = self._clock.mark()

    def end(self, operation: ActiveOperation) -> None:
        """Record the end of an operation; calls after the first have no effect."""
        self._open.pop(operation, None)
        self.changes += 1
        if not operation.is_kept:
            return
        with self._ending:
            if operation.end is None:
                operation.end = self._clock.mark()
                idle_since = self._idle_since
                if idle_since is not None and operation.waited_from is None:
                    operation.waited_from = max(operation.start, idle_since)
                self._done.append(operation)

    def drop(self, operation: ActiveOperation) -> None:
        """Discard an operation that could not be started, or that failed."""
        self._open.pop(operation, None)

    def in_progress(self) -> ActiveOperation | None:
        """Return the oldest operation that has not ended, for another thread; None if there is none."""
        for operation in list(self._open):
            if operation.has_ended is None or not self._clock.on_host or not operation.has_ended():
                return operation
        return None

    def poll_later(self, operation: ActiveOperation, has_ended: Callable[[], bool]) -> None:
        """Let `poll` detect the end of an operation, in case the thread that reports it is late or does not run."""
        operation.has_ended = has_ended
        if operation.is_kept:
            self._polled.append(operation)

    def mark_engine_start(self, operation: ActiveOperation) -> bool:
        """Record that the autograd engine started an operation in a backward pass, which will wait for it.

        Return whether `poll` is enough to detect its end. That is so for a small all-reduce that is the last one of the
        pass, judging by the step before: nothing is computed until it has ended, and then `poll` is called. A callback
        that reports the end from another thread would slow down a small step by 1%.
        """
        if not self._clock.on_host:
            return False
        self._engine_start = operation.start, time.thread_time() + self._clock.slept_s
        if operation.kind is not RowKind.ALL_REDUCE:
            return False
        self._engine_count += 1
        return self._engine_count == self._engine_count_before and operation.bytes < SMALL_BYTES

    def take_engine_start(self) -> CpuMark | None:
        """Return and clear the time of the engine's last operation, which starts as soon as its gradients are ready."""
        mark, self._engine_start = self._engine_start, None
        return mark

    def poll(self) -> None:
        """Record the end of all polled operations that have ended.

        The thread that runs an operation reports its end only once it gets Python's GIL and a core. On a busy machine
        that may be milliseconds later, when the compute thread has finished waiting and computes again.
        """
        if not self._polled:
            return
        if self._clock.on_host:
            for operation in self._polled:
                if operation.end is None and operation.has_ended is not None and operation.has_ended():
                    self.end(operation)
        self._polled = [operation for operation in self._polled if operation.end is None]

    def _forget(self, condition: Callable[[ActiveOperation], bool]) -> None:
        for operation in list(self._open):
            if condition(operation):
                self._open.pop(operation, None)

    def _is_over(self, operation: ActiveOperation) -> bool:
        """Return whether an operation has ended, although nobody has waited for it in Python: its handle holds memory.

        Gloo does not tell whether a message has arrived, so messages of earlier steps count as ended.
        """
        if operation.kind in MESSAGES:
            return operation.step < self._step - 1
        ended = operation.has_ended
        return not operation.is_kept and ended is not None and self._clock.on_host and ended()

    def take_rows(self, *, wait: bool = True) -> list[tuple[Any, ...]]:
        """Return the rows of operations that ended since the last call.

        On a GPU, wait for their events; with `wait=False`, leave those that the device has not reached for later.
        """
        rows = []
        for _ in range(len(self._done)):
            if not (wait or self._clock.has_reached(self._done[0].end)):
                break
            rows.append(self._row(self._done.popleft()))
        return rows

    def _row(self, operation: ActiveOperation) -> tuple[Any, ...]:
        start_s, end_s = self._read(operation.start), self._read(operation.end)
        waited_from_s = NOT_MEASURED
        if operation.waited_from is operation.start:
            waited_from_s = start_s
        elif operation.waited_from is not None:
            waited_from_s = self._read(operation.waited_from)
        return (
            operation.step,
            operation.kind,
            operation.purpose,
            operation.peer,
            operation.bytes,
            start_s,
            max(start_s, end_s),
            waited_from_s,
            NOT_MEASURED,
        )

    def _computes_here(self) -> bool:
        """Return whether compute stops while this thread waits. On a GPU streams wait, whichever thread calls."""
        return not self._clock.on_host or threading.get_ident() == self._computing_thread

    def _read(self, mark: Mark) -> float:
        self._clock.wait(mark)  # Each mark, since operations may end on streams of their own.
        seconds = self._clock.read(mark)
        self._clock.release(mark)
        return seconds

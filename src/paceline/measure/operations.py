"""Log of communication operations: kind, bytes, purpose, start, end, and since when the compute thread waited."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.measure.clock import Clock, CpuMark, Mark
from paceline.records.timeline import NOT_MEASURED, Purpose, RowKind, is_recorded

SMALL_BYTES = 2**20
"""Size that takes at most about 0.1 ms to copy."""


class ActiveOperation:
    """An operation in progress."""

    __slots__ = ("bytes", "end", "kind", "peer", "purpose", "start", "step", "waited_from")

    def __init__(self, step: int, kind: RowKind, purpose: Purpose, size: int, peer: int, start: Mark) -> None:
        self.step = step
        self.kind = kind
        self.purpose = purpose
        self.bytes = size
        self.peer = peer
        self.start = start
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
        self._step = 0
        self._keeping = False
        self._context = _ThreadContext()
        self._idle_since: Mark = None
        self._done: deque[ActiveOperation] = deque()  # Other threads append to it while it is emptied.
        self._polled: list[tuple[ActiveOperation, Callable[[], bool]]] = []
        self._ending = threading.Lock()
        self._computing_thread = threading.get_ident()
        self._engine_count = self._engine_count_before = 0
        self._engine_start: CpuMark | None = None
        self.has_async_operations = False
        """Whether Python code, such as a DDP communication hook, has started an asynchronous operation."""

    def begin_step(self, step: int) -> None:
        """Start a step, computed by this thread; operations that start from here on belong to it."""
        self._step, self._keeping = step, is_recorded(step)
        self._computing_thread = threading.get_ident()
        self._engine_count_before, self._engine_count = self._engine_count, 0

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

    def start(self, kind: RowKind, size: int, peer: int, *, blocking: bool = False) -> ActiveOperation | None:
        """Record the start of an operation, `blocking` if this thread waits for it; return None if it is not kept."""
        step = self._context.step
        if not (self._keeping if step is None else is_recorded(step)):
            return None
        step = self._step if step is None else step
        operation = ActiveOperation(step, kind, self._context.purpose, size, peer, self._clock.mark())
        if blocking and self._computes_here():
            operation.waited_from = operation.start
        return operation

    def mark_waiting(self, operation: ActiveOperation) -> None:
        """Record that this thread starts to wait for the end of an operation."""
        if operation.waited_from is None and operation.end is None and self._computes_here():
            operation.waited_from = self._clock.mark()

    def end(self, operation: ActiveOperation) -> None:
        """Record the end of an operation; calls after the first have no effect."""
        with self._ending:
            if operation.end is None:
                operation.end = self._clock.mark()
                idle_since = self._idle_since
                if idle_since is not None and operation.waited_from is None:
                    operation.waited_from = max(operation.start, idle_since)
                self._done.append(operation)

    def poll_later(self, operation: ActiveOperation, has_ended: Callable[[], bool]) -> None:
        """Let `poll` detect the end of an operation, in case the thread that reports it is late or does not run."""
        self._polled.append((operation, has_ended))

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
            for operation, has_ended in self._polled:
                if operation.end is None and has_ended():
                    self.end(operation)
        self._polled = [entry for entry in self._polled if entry[0].end is None]

    def take_rows(self) -> list[tuple[Any, ...]]:
        """Return the rows of operations that ended since the last call; on a GPU, wait for their events."""
        return [self._row(self._done.popleft()) for _ in range(len(self._done))]

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
        seconds = self._clock.read(mark)
        self._clock.release(mark)
        return seconds

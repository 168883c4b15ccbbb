"""Notes the operations on the wire: what, how much, for what, from when to when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.measure.clock import Clock, ClockMoment, Mark
from paceline.records.timeline import NOT_MEASURED, Purpose, RowKind, is_recorded

SMALL_BYTES = 2**20
"""What takes no longer to copy than a tenth of a millisecond or so."""


class ActiveOperation:
    """An operation under way."""

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
        """`start` itself where the computing thread did not go on after it."""


class _Said(threading.local):
    """What a thread says of the operations that it starts."""

    purpose = Purpose.GRADIENTS
    step: int | None = None
    """The step for whose sake it works, where that may be another than the one that goes on."""


class OperationLog:
    """The operations of one rank. Other threads may start them too, and note their ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step = 0
        self._keeping = False
        self._said = _Said()
        self._idle_since: Mark = None
        self._done: deque[ActiveOperation] = deque()  # Other threads add to it while it is emptied.
        self._under_way: list[tuple[ActiveOperation, Callable[[], bool]]] = []
        self._ending = threading.Lock()
        self._computing_thread = threading.get_ident()
        self._of_engine = self._of_engine_before = 0
        self._engine_sent: ClockMoment | None = None
        self.left_open = False
        """Whether an operation was left to end on its own, other than by the engine."""

    def begin_step(self, step: int) -> None:
        """What starts from here on is part of a step, which this thread computes."""
        self._step, self._keeping = step, is_recorded(step)
        self._computing_thread = threading.get_ident()
        self._of_engine_before, self._of_engine = self._of_engine, 0

    def end_step(self) -> None:
        """What starts from here on is not part of any step."""
        self._keeping = False

    def drop_step(self) -> None:
        """The step that has begun does not take place: what was noted in it is forgotten."""
        with self._ending:
            kept = [operation for operation in self._done if operation.step != self._step]
            self._done.clear()
            self._done.extend(kept)
        self.end_step()

    @contextmanager
    def carrying(self, purpose: Purpose) -> Iterator[None]:
        """Says what operations carry; elsewhere they carry gradients."""
        before, self._said.purpose = self._said.purpose, purpose
        try:
            yield
        finally:
            self._said.purpose = before

    @property
    def step(self) -> int:
        """The step that goes on, or was the last one."""
        return self._step

    @contextmanager
    def on_behalf_of(self, step: int) -> Iterator[None]:
        """What this thread starts is part of a step, which may have ended."""
        self._said.step = step
        try:
            yield
        finally:
            self._said.step = None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The computing thread does nothing but wait, for operations that another thread starts one after the other.

        Each that ends meanwhile was waited for; those that go on after it were not.
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
        """An operation starts, and the thread waits for its end at once or not; None where nobody wants to know."""
        step = self._said.step
        if not (self._keeping if step is None else is_recorded(step)):
            return None
        step = self._step if step is None else step
        operation = ActiveOperation(step, kind, self._said.purpose, size, peer, self._clock.mark())
        if blocking and self._computes_here():
            operation.waited_from = operation.start
        return operation

    def waiting(self, operation: ActiveOperation) -> None:
        """The thread begins to wait for its end."""
        if operation.waited_from is None and operation.end is None and self._computes_here():
            operation.waited_from = self._clock.mark()

    def end(self, operation: ActiveOperation) -> None:
        """It has ended; only the first to say so is heard."""
        with self._ending:
            if operation.end is None:
                operation.end = self._clock.mark()
                idle_since = self._idle_since
                if idle_since is not None and operation.waited_from is None:
                    operation.waited_from = max(operation.start, idle_since)
                self._done.append(operation)

    def look_after(self, operation: ActiveOperation, has_ended: Callable[[], bool]) -> None:
        """Has `look` notice its end, should the thread that would tell it come too late, or not at all."""
        self._under_way.append((operation, has_ended))

    def by_engine(self, operation: ActiveOperation) -> bool:
        """Says that the engine has started it in a backward pass, which waits for it; whether `look` is enough.

        It is for a small all-reduce that comes last, as in the step before: until it has ended nothing is computed any
        more, and then `look` is called. A thread that tells its end would cost a small step a percent.
        """
        if not self._clock.on_host:
            return False
        self._engine_sent = operation.start, time.thread_time() + self._clock.slept_s
        if operation.kind is not RowKind.ALL_REDUCE:
            return False
        self._of_engine += 1
        return self._of_engine == self._of_engine_before and operation.bytes < SMALL_BYTES

    def take_engine_sent(self) -> ClockMoment | None:
        """When the engine has last started an operation, which it does as soon as it has the gradients for it."""
        moment, self._engine_sent = self._engine_sent, None
        return moment

    def look(self) -> None:
        """Notes the end of what has ended by now.

        The thread that runs an operation tells its end only once it gets Python's lock, or a core: on a busy machine
        that may be milliseconds later, when the computing thread is done with waiting for it and computes again.
        """
        if not self._under_way:
            return
        if self._clock.on_host:
            for operation, has_ended in self._under_way:
                if operation.end is None and has_ended():
                    self.end(operation)
        self._under_way = [entry for entry in self._under_way if entry[0].end is None]

    def take_rows(self) -> list[tuple[Any, ...]]:
        """The rows of those that have ended since the last call; waits for the device where it has to."""
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
        """Whether nothing is computed while this thread waits. A GPU goes by its streams, whichever thread asks it."""
        return not self._clock.on_host or threading.get_ident() == self._computing_thread

    def _read(self, mark: Mark) -> float:
        seconds = self._clock.read(mark)
        self._clock.release(mark)
        return seconds

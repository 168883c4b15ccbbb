"""Notes the operations on the wire: what, how much, for what, from when to when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.measure.clock import Clock, Mark
from paceline.records.timeline import NEVER, Kind, Purpose, keeps


class Operation:
    """An operation under way."""

    __slots__ = ("bytes", "end", "kind", "peer", "purpose", "start", "step", "waited_from")

    def __init__(self, step: int, kind: Kind, purpose: Purpose, size: int, peer: int, start: Mark) -> None:
        self.step = step
        self.kind = kind
        self.purpose = purpose
        self.bytes = size
        self.peer = peer
        self.start = start
        self.end: Mark = None
        self.waited_from: Mark = None


class OperationLog:
    """The operations of one rank. Their ends may be noted by other threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step = 0
        self._keeping = False
        self._purpose = Purpose.GRADIENTS
        self._done: list[Operation] = []

    def begin_step(self, step: int) -> None:
        """What starts from here on is part of a step."""
        self._step, self._keeping = step, keeps(step)

    def end_step(self) -> None:
        """What starts from here on is not part of any step."""
        self._keeping = False

    @contextmanager
    def carrying(self, purpose: Purpose) -> Iterator[None]:
        """Says what operations carry; elsewhere they carry gradients."""
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    def start(self, kind: Kind, size: int, peer: int) -> Operation | None:
        """An operation starts; None where nobody wants to know."""
        if not self._keeping:
            return None
        return Operation(self._step, kind, self._purpose, size, peer, self._clock.mark())

    def waiting(self, operation: Operation) -> None:
        """The computing thread begins to wait for its end."""
        if operation.waited_from is None:
            operation.waited_from = self._clock.mark()

    def end(self, operation: Operation) -> None:
        """It has ended; only the first to say so is heard."""
        if operation.end is None:
            operation.end = self._clock.mark()
            self._done.append(operation)

    def take_rows(self) -> list[tuple[Any, ...]]:
        """The rows of those that have ended since the last call; waits for the device where it has to."""
        done, self._done = self._done, []
        return [self._row(operation) for operation in done]

    def _row(self, operation: Operation) -> tuple[Any, ...]:
        start_s, end_s = self._read(operation.start), self._read(operation.end)
        waited_from_s = NEVER if operation.waited_from is None else self._read(operation.waited_from)
        return (
            operation.step,
            operation.kind,
            operation.purpose,
            operation.peer,
            operation.bytes,
            start_s,
            max(start_s, end_s),
            waited_from_s,
            NEVER,
        )

    def _read(self, mark: Mark) -> float:
        seconds = self._clock.read(mark)
        self._clock.release(mark)
        return seconds

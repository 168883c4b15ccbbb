"""Marks what happens on a rank beside its steps: evaluations, checkpoints, ends of epochs, garbage collections."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.records.schema import MarkRow
from paceline.records.writer import MarkWriter

LONG_COLLECTION_S = 0.001
"""Collections of young objects that take less are too many, and too short, to explain anything."""
OLDEST_GENERATION = 2
MOST_WAITING = 10_000


class Marks:
    """What happened on one rank. Nothing reaches the disk before `flush`, which the sampler calls between its naps."""

    def __init__(self, writer: MarkWriter, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        # A collection may start anywhere, inside our own writing too, so its mark is only put here. A child that was
        # forked from us never writes its own: it must not pile them up.
        self._waiting: deque[MarkRow] = deque(maxlen=MOST_WAITING)
        self._collection_s = 0.0
        gc.callbacks.append(self._collected)

    def add(self, kind: str, start_s: float, end_s: float, detail: str = "") -> None:
        """Marks what has happened from one moment to another."""
        self._waiting.append(MarkRow(kind, start_s, end_s, detail))

    def moment(self, kind: str, detail: str = "") -> None:
        """Marks what happens just now."""
        now_s = self._now()
        self.add(kind, now_s, now_s, detail)

    @contextmanager
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        """Marks what goes on for the length of a `with`, also when that ends in an error."""
        start_s = self._now()
        try:
            yield
        finally:
            self.add(kind, start_s, self._now(), detail)

    def flush(self) -> None:
        """Writes down what has been marked."""
        if self._waiting:
            self._writer.write([self._waiting.popleft() for _ in range(len(self._waiting))])

    def close(self) -> None:
        """Writes down the rest, and stops listening to the garbage collector."""
        gc.callbacks.remove(self._collected)
        self.flush()
        self._writer.close()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_s = self._now()
            return
        end_s = self._now()
        generation = info["generation"]
        if generation >= OLDEST_GENERATION or end_s - self._collection_s > LONG_COLLECTION_S:
            self.add("gc", self._collection_s, end_s, f"generation {generation}")

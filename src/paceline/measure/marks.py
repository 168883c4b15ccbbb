"""Events on a rank other than its steps: evaluations, ends of epochs, garbage collections."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.records.schema import MarkRow
from paceline.records.writer import MarkWriter

LONG_COLLECTION_S = 0.001
"""Shorter collections of young objects are not recorded: they are too many and too short to matter."""
OLDEST_GENERATION = 2
MAX_QUEUED = 10_000


class Marks:
    """Events of one rank. They are written to disk by `flush`, which the resource sampler calls after each sample."""

    def __init__(self, writer: MarkWriter, now: Callable[[], float]) -> None:
        self._writer = writer
        self._now = now
        # A collection may start anywhere, even while `flush` writes, so its mark is only queued. The length is limited
        # because forked child processes never write their marks.
        self._queue: deque[MarkRow] = deque(maxlen=MAX_QUEUED)
        self._collection_s = 0.0
        gc.callbacks.append(self._on_collection)

    def add(self, kind: str, start_s: float, end_s: float, detail: str = "") -> None:
        """Record an event from `start_s` to `end_s`."""
        self._queue.append(MarkRow(kind, start_s, end_s, detail))

    def add_now(self, kind: str, detail: str = "") -> None:
        """Record an event at the current time."""
        now_s = self._now()
        self.add(kind, now_s, now_s, detail)

    @contextmanager
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        """Record the `with` block as an event, also if it raises."""
        start_s = self._now()
        try:
            yield
        finally:
            self.add(kind, start_s, self._now(), detail)

    def flush(self) -> None:
        """Write all queued events to disk."""
        if self._queue:
            self._writer.write([self._queue.popleft() for _ in range(len(self._queue))])

    def close(self) -> None:
        """Write the remaining events, and stop recording garbage collections."""
        gc.callbacks.remove(self._on_collection)
        self.flush()
        self._writer.close()

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_s = self._now()
            return
        end_s = self._now()
        generation = info["generation"]
        if generation >= OLDEST_GENERATION or end_s - self._collection_s > LONG_COLLECTION_S:
            self.add("gc", self._collection_s, end_s, f"generation {generation}")

"""Writer of a run's record on one rank: rank 0 writes the events, every rank its own steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import msgspec

from paceline.records import EventWriter, RunDescription, RunFolder, StepWriter, Summary, Topology, provenance
from paceline.records.events import ConfigEvent, EndEvent, RunEvent
from paceline.records.settings import Settings
from paceline.records.step_counter import StepCounter
from paceline.records.timeline import TimelineWriter

WriteEvent = Callable[[RunEvent], None]
"""Callback for events."""


def discard_event(event: RunEvent) -> None:
    """Ignore the event."""


class RecordListener(Protocol):
    """Receiver of a run's events on this rank, such as the TensorBoard writer."""

    def on_event(self, event: RunEvent) -> None:
        """Handle an event."""

    def close(self) -> None:
        """Close the listener; may be called more than once."""


class RunRecorder:
    """Writer of one rank's part of a run's record."""

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        now: Callable[[], float],
        on_event: WriteEvent = discard_event,
        *,
        continued_s: float | None = None,
    ) -> None:
        """Open the record. With `continued_s`, it has events until that time, which are kept."""
        self.folder = folder
        self._rank = rank
        self._events = EventWriter(folder, now, continued_s=continued_s) if rank == 0 else None
        self._on_event = on_event
        self._listeners: list[RecordListener] = []
        self._counter: StepCounter | None = None

    @cached_property
    def steps(self) -> StepWriter:
        """Writer of this rank's steps. The file is created after the description, which declares its contents."""
        return StepWriter(self.folder, self._rank)

    def step_counter(self, done: int) -> StepCounter | None:
        """Return the counter of steps on rank 0, which begins at `done`; None on others."""
        if self._rank == 0:
            self._counter = StepCounter(self.folder.path, done)
        return self._counter

    @cached_property
    def timeline(self) -> TimelineWriter:
        """Writer of this rank's timeline."""
        return TimelineWriter(self.folder.path, self._rank)

    def write_event(self, event: RunEvent) -> None:
        """Write an event to the record (rank 0 only) and pass it to this rank's listeners."""
        if self._events is not None:
            self._events.write(event)
        self._on_event(event)
        for listener in self._listeners:
            listener.on_event(event)

    def add_listener(self, listener: RecordListener) -> None:
        """Add a listener, which receives events until `close`."""
        self._listeners.append(listener)

    def write_description(self, config: Settings, topology: Topology, command: str | None) -> None:
        """Write the information known before the first step; `command` is the command line of the user."""
        self.folder.write_run(RunDescription(config=config, topology=topology, provenance=provenance(command)))
        self.write_event(ConfigEvent(**msgspec.structs.asdict(topology)))

    def write_summary(self, summary: Summary) -> None:
        """Write the figures of the whole run."""
        if self._events is not None:
            self.folder.write_summary(summary)

    def finish(self, summary: Summary) -> None:
        """Write the figures and mark the run as finished."""
        self.write_summary(summary)
        if self._events is not None:
            self.write_event(EndEvent())
            self.folder.mark_finished()

    def close(self) -> None:
        """Close the files and all listeners."""
        for listener in self._listeners:
            listener.close()
        for name in ("steps", "timeline"):
            if name in self.__dict__:  # The file exists only if it was used.
                getattr(self, name).close()
        if self._counter is not None:
            self._counter.close()
        if self._events is not None:
            self._events.close()

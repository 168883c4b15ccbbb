"""A run's record while it grows, as one rank writes it: rank 0 tells what happens, every rank writes its own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

from paceline.records import EventWriter, RunFolder, StepWriter, provenance
from paceline.records.timeline import TimelineWriter

WriteEvent = Callable[..., None]
"""Where an account of the run goes: `report(event, **values)`."""


def discard_event(event: str, **values: Any) -> None:
    """A listener that does not."""


class RecordListener(Protocol):
    """Somebody who writes down what happens in another way."""

    def on_event(self, event: str, **values: Any) -> None:
        """Something has happened."""

    def close(self) -> None:
        """Nothing more will; called once or more often."""


class RunRecorder:
    """What one rank writes of a run."""

    def __init__(
        self, folder: RunFolder, rank: int, now: Callable[[], float], on_event: WriteEvent = discard_event
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._events = EventWriter(folder, now) if rank == 0 else None
        self._on_event = on_event
        self._listeners: list[RecordListener] = []

    @cached_property
    def steps(self) -> StepWriter:
        """This rank's steps. Their file appears after the description, which says what is in it."""
        return StepWriter(self.folder, self._rank)

    @cached_property
    def timeline(self) -> TimelineWriter:
        """When this rank did what."""
        return TimelineWriter(self.folder.path, self._rank)

    def write_event(self, event: str, **values: Any) -> None:
        """Tells what happens: rank 0 to the record's events, every rank to its own listener."""
        if self._events is not None:
            self._events.write(event, **values)
        self._on_event(event, **values)
        for listener in self._listeners:
            listener.on_event(event, **values)

    def add_listener(self, listener: RecordListener) -> None:
        """Has somebody else on this rank hear what happens, until the account is closed."""
        self._listeners.append(listener)

    def write_description(self, config: Mapping[str, Any], topology: Mapping[str, Any], command: str | None) -> None:
        """What is known before the first step; `command` is what the user typed."""
        self.folder.write_run(config=config, topology=topology, provenance=provenance(command))
        self.write_event("config", **topology)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """The figures of the whole run."""
        if self._events is not None:
            self.folder.write_summary(summary)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The figures, and that the run did all it set out to do."""
        self.write_summary(summary)
        if self._events is not None:
            self.write_event("end")
            self.folder.mark_finished()

    def close(self) -> None:
        """Closes the files, and those of all who on_event."""
        for listener in self._listeners:
            listener.close()
        self.steps.close()
        if "timeline" in self.__dict__:  # It was asked for.
            self.timeline.close()
        if self._events is not None:
            self._events.close()

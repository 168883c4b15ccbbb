"""Monitor a rank while it trains: sample its resources, record events other than steps. Always on, low cost."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.measure.marks import Marks
from paceline.measure.resources import ProcessProbe, ResourceSampler
from paceline.records import RunFolder
from paceline.records.events import EpochEvent, RunEvent
from paceline.records.writer import MarkWriter, ResourceWriter


class RunMonitor:
    """Monitor of one rank, active from its creation to `close`. `now` returns seconds on the clock of the steps."""

    def __init__(
        self, folder: RunFolder, rank: int, now: Callable[[], float], device: torch.device, *, first_on_host: bool
    ) -> None:
        self.marks = Marks(MarkWriter(folder, rank), now)
        probe = ProcessProbe(device, with_host=first_on_host)
        self.sampler = ResourceSampler(probe, ResourceWriter(folder, rank), now, after_sample=self.marks.flush)
        self.sampler.start()
        self._is_open = True

    def on_event(self, event: RunEvent) -> None:
        """Handle an event of the run recorder: record the end of an epoch."""
        if isinstance(event, EpochEvent):
            self.marks.add_now("epoch", str(event.epoch))

    def close(self) -> None:
        """Stop, and write everything to disk; calls after the first have no effect."""
        if self._is_open:
            self._is_open = False
            self.sampler.close()
            self.marks.close()

"""Watches a rank while it trains: samples its resources, marks what happens beside its steps. Always on, and cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.measure.marks import Marks
from paceline.measure.resources import ProcessProbe, ResourceSampler
from paceline.records import RunFolder
from paceline.records.writer import MarkWriter, ResourceWriter


class RunMonitor:
    """Goes on from its making to `close`. `now` tells seconds on the clock of the steps."""

    def __init__(
        self, folder: RunFolder, rank: int, now: Callable[[], float], device: torch.device, *, first_on_host: bool
    ) -> None:
        self.marks = Marks(MarkWriter(folder, rank), now)
        probe = ProcessProbe(device, with_host=first_on_host)
        self.sampler = ResourceSampler(probe, ResourceWriter(folder, rank), now, also=self.marks.flush)
        self.sampler.start()
        self._is_open = True

    def on_event(self, event: str, **values: Any) -> None:
        """Listens to the account of a run, which tells when an epoch has ended."""
        if event == "epoch":
            self.marks.moment("epoch", str(values["epoch"]))

    def close(self) -> None:
        """Ends it, with everything written; once is enough."""
        if self._is_open:
            self._is_open = False
            self.sampler.close()
            self.marks.close()

"""Finds what a ticket stands for: which share of which step of which epoch.

Where ranks do not step together, each gets tickets in the order of their numbers and trains what they stand for; so
every sample is trained once an epoch, whoever trains it. Every rank goes through the same epochs by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import WorkloadError
from paceline.workloads.batches import MicroBatch, MicroBatchesOfRank, Source

ONE_SHOT_HINT = "give a data set or something that can be iterated again, not a generator that runs once"


@dataclass(frozen=True)
class TicketShare:
    """What a ticket stands for."""

    epoch: int
    step: int
    """Counts from 0 over the whole run, as all ranks count it."""
    micro_batches: list[MicroBatch]


class Tickets:
    """Goes through a source as tickets come; a rank's only ever grow."""

    def __init__(self, source: Source, epochs: int | None, steps: int | None) -> None:
        """The run ends after so many steps or, where those are not known, epochs."""
        self.epoch_ends: list[int] = []
        """The steps at which the epochs that were gone through have ended."""
        self._source = source
        self._epochs, self._steps = epochs, steps
        self._global_steps: Iterator[MicroBatchesOfRank] = source.global_steps(0)
        self._step = -1
        self._micro_batches_of: MicroBatchesOfRank | None = None

    def find(self, ticket: int) -> TicketShare | None:
        """What this ticket stands for; None for one that lies behind the end of the run."""
        step, share = divmod(ticket, self._source.share.workers)
        if self._steps is not None and step >= self._steps:
            return None
        while self._step < step:
            if not self._advance():
                return None
        assert self._micro_batches_of is not None
        return TicketShare(len(self.epoch_ends), step, self._micro_batches_of(share))

    def _advance(self) -> bool:
        """Goes one step on, into the next epoch where this one has ended; False at the end of the run."""
        if self._has_ended:
            return False
        found = next(self._global_steps, None)
        while found is None:
            epoch_began = self.epoch_ends[-1] if self.epoch_ends else 0
            self.epoch_ends.append(self._step + 1)
            if self.epoch_ends[-1] == epoch_began:
                raise WorkloadError(
                    f"the training data gave no batch in epoch {len(self.epoch_ends)}.", hint=ONE_SHOT_HINT
                )
            if self._has_ended:
                return False
            self._global_steps = self._source.global_steps(len(self.epoch_ends))
            found = next(self._global_steps, None)
        self._micro_batches_of = found
        self._step += 1
        return True

    @property
    def _has_ended(self) -> bool:
        return self._steps is None and len(self.epoch_ends) == (self._epochs or 1)

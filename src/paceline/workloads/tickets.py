"""Resolution of tickets to shares of the training data.

A ticket is a number that names one share of one step's global batch: with n workers, ticket t is share t mod n of step
t div n. Asynchronous strategies hand out tickets in increasing order, each to one rank. So every sample is trained once
per epoch, on whichever rank received its ticket. Every rank iterates over the same epochs by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import UsageError, WorkloadError
from paceline.workloads.batches import MicroBatch, MicroBatchesOfRank, Source
from paceline.workloads.position import START, Position

ONE_SHOT_HINT = "provide a data set or an iterable that can be iterated again, not a generator that runs once"


@dataclass(frozen=True)
class TicketShare:
    """Share of the training data that a ticket names."""

    epoch: int
    step: int
    """Number of the step from 0 over the whole run, the same on all ranks."""
    micro_batches: list[MicroBatch]


class Tickets:
    """Resolver of one rank's tickets, whose numbers only increase."""

    def __init__(self, source: Source, epochs: int | None, steps: int | None, start: Position = START) -> None:
        """Resolve tickets up to the given number of steps or, if `steps` is None, of epochs.

        Steps are counted from the beginning of the run, tickets from its position `start`, where it resumes.
        """
        if source.order_checksum(0) is not None:
            raise UsageError(
                "the DataLoader has its own sampler, but under this strategy ranks do not begin an epoch together.",
                hint="leave the sampler out, or use a strategy under which ranks step together",
            )
        self.epoch_ends = list(start.epoch_ends)
        """Step at which each finished epoch ended."""
        self._source = source
        self._epochs, self._steps = epochs, steps
        self._first_step = start.step
        self._global_steps: Iterator[MicroBatchesOfRank] = source.global_steps(start.epoch, start)
        self._step = start.step - 1
        self._micro_batches_of: MicroBatchesOfRank | None = None

    def find(self, ticket: int) -> TicketShare | None:
        """Return the share that a ticket names; None if it is after the end of the run."""
        step, share = divmod(ticket, self._source.share.workers)
        step += self._first_step
        if self._steps is not None and step >= self._steps:
            return None
        while self._step < step:
            if not self._advance():
                return None
        assert self._micro_batches_of is not None
        return TicketShare(len(self.epoch_ends), step, self._micro_batches_of(share))

    def _advance(self) -> bool:
        """Advance by one step, into the next epoch if this one has ended; return False at the end of the run."""
        if self._has_ended:
            return False
        found = next(self._global_steps, None)
        while found is None:
            epoch_began = self.epoch_ends[-1] if self.epoch_ends else 0
            self.epoch_ends.append(self._step + 1)
            if self.epoch_ends[-1] == epoch_began:
                raise WorkloadError(
                    f"the training data has no batch in epoch {len(self.epoch_ends)}.", hint=ONE_SHOT_HINT
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

"""Stop of a run that the launcher asks for, when the machine is needed for something else: after a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from paceline.comm.stores.stop_request import StopRequest
from paceline.errors import PreemptedError
from paceline.training.checkpoints.checkpointer import Checkpointer
from paceline.training.recording.windows import Windows
from paceline.training.sync import Sync
from paceline.workloads.position import Position

LONGEST_WINDOW_S, LONGEST_ASYNCHRONOUS_S = 2.0, 10.0
"""Longest window of a run that may be asked to stop, since it stops at the end of one: if ranks step together, and if
they wait for each other at the ends of windows only."""


@dataclass(frozen=True)
class Stops:
    """Stop of one run, on one rank. A run without checkpoints does not stop: the launcher ends it."""

    request: StopRequest
    sync: Sync
    windows: Windows
    checkpointer: Checkpointer | None

    @property
    def is_possible(self) -> bool:
        """Whether the run can be asked to stop."""
        return self.checkpointer is not None and self.request.is_possible

    def limit_window(self, step: int, count: int) -> int:
        """Return the length of the next window, which is short if steps are long.

        If the run was asked to stop, rank 0 announces that it does so at the end of this window. All ranks read that
        after the window: closing it is an exchange between them, which begins after this call.
        """
        if not self.is_possible:
            return count
        last, strategy = self.windows.totals.last, self.sync.strategy
        if last is not None:
            longest_s = LONGEST_WINDOW_S if strategy.lockstep else LONGEST_ASYNCHRONOUS_S
            periods = max(1, int(longest_s / last.step_s / strategy.period))
            count = min(count, periods * strategy.period)
        if self.sync.rank == 0 and self.request.requested():
            self.request.announce(step + count)
        return count

    def is_reached(self, step: int) -> bool:
        """Return whether the run stops here; the same on all ranks after a window."""
        announced = self.request.announced() if self.is_possible else None
        return announced is not None and step >= announced

    def stop(self, position: Position) -> NoReturn:
        """Write a checkpoint, and raise on all ranks alike."""
        assert self.checkpointer is not None
        self.checkpointer.write(position, must_succeed=True)
        self.checkpointer.finish(must_succeed=True)
        raise PreemptedError(
            f"the run was asked to stop, and did so after step {position.step}; its checkpoint is written.",
            hint="start the same command again with --resume, and it goes on from there",
        )

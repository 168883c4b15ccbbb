"""Marks of synchronous messages, by which servers detect workers that do not make the same step.

A worker's gradients end with a `StepMark`: checksums of what must be the same on all workers. The server compares them.
Its weights end with a `Verdict`, so that all workers raise the same error and none waits for another.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import WorkloadError


class StepMark(NamedTuple):
    """Checksums that a worker sends with its gradients. They must be the same on all workers of a synchronous step."""

    settings: int = 0
    """Checksum of the settings of the worker's optimiser."""
    weights: int = 0
    """Checksum of the weights if they are not those that the server sent, else 0."""


class Difference(enum.IntEnum):
    """Difference between the steps of two workers."""

    NONE = 0
    WEIGHTS = 1
    SETTINGS = 2


class Verdict(NamedTuple):
    """Result of comparing the marks of a step, which the server sends with the weights."""

    difference: int = Difference.NONE
    rank: int = 0
    """Rank of a worker that changed weights, or whose settings differ from those of the first."""

    def check(self) -> None:
        """Raise a WorkloadError if the workers' steps differ."""
        if self.difference == Difference.WEIGHTS:
            raise WorkloadError(
                f"weights were changed outside step() on rank {self.rank}, and not in the same way on all ranks.",
                hint="load or change weights on every rank in the same way, or on rank 0 before attach()",
            )
        if self.difference == Difference.SETTINGS:
            raise WorkloadError(
                f"the optimiser on rank {self.rank} has other settings than that on rank 0, or has loaded a state that "
                "the other has not loaded.",
                hint="set the same learning rate on every rank (give a scheduler such as ReduceLROnPlateau the mean "
                "over the ranks), and call load_state_dict on every rank",
            )


def compare_marks(marks: Mapping[int, StepMark], *, server_trains: bool) -> Verdict:
    """Compare the marks of all workers, by rank.

    A server that trains has the weights of its own worker. Any other server has the weights that it sent: no worker may
    have changed them.
    """
    first = marks[min(marks)]
    weights = first.weights if server_trains else 0
    for rank, mark in marks.items():
        if mark.weights != weights:
            return Verdict(Difference.WEIGHTS, rank if mark.weights else min(marks))
        if mark.settings != first.settings:
            return Verdict(Difference.SETTINGS, rank)
    return Verdict()

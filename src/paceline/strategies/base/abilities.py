"""Abilities that few strategies have: protocols of one method. A strategy has an ability if it has the method.

Callers test `isinstance(strategy, GivesTickets)`, never a strategy's class or name.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class LimitsRanks(Protocol):
    """Ability to run only with some numbers of ranks."""

    def check_ranks(self, world_size: int) -> None:
        """Raise a UsageError if the strategy cannot run with this number of ranks."""


@runtime_checkable
class UsesAllGpus(Protocol):
    """Ability to train on all GPUs of a host in one process. It is no baseline, although one rank trains."""

    def check_gpus(self, gpus: int) -> None:
        """Raise a UsageError if the strategy cannot run on a host with so many GPUs; 0 for a run on CPUs."""


@runtime_checkable
class SlowOnGpus(Protocol):
    """Ability to say why it is not worth measuring on GPUs, where named sets leave it out."""

    def why_slow_on_gpus(self) -> str:
        """Return the reason, as a clause."""


@runtime_checkable
class ServesParameters(Protocol):
    """Ability to use servers: ranks that keep parameters and do not train. Needed if `roles` names servers."""

    def serve(self) -> None:
        """Serve the workers until they close; called on servers after `attach`."""


@runtime_checkable
class GivesTickets(Protocol):
    """Ability to say which share of the data a rank trains next. Needed if ranks do not step together."""

    def next_ticket(self) -> int:
        """Return the share of the data that this rank trains next, as step × ranks + share.

        Each number is given to exactly one rank, in increasing order.
        """


@runtime_checkable
class UpdatesInParts(Protocol):
    """Ability to update the parameters of one step in several calls of the optimiser."""

    def partial_update_step(self) -> int | None:
        """Return the number of the step that the optimiser's current call is a part of; None for a whole step."""


@runtime_checkable
class ReportsMetrics(Protocol):
    """Ability to add figures to the summary of a run's record."""

    def metrics(self) -> dict[str, Any]:
        """Return the strategy's own entries for the summary, the same on every rank; called on every rank."""


@runtime_checkable
class MayLackMean(Protocol):
    """Ability to average gradients on ranks that do not train, depending on options."""

    def why_no_mean(self) -> str | None:
        """Return a sentence that says why no rank that trains has the mean gradient; None if one has it."""

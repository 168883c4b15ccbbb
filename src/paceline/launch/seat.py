"""Where a process that starts ranks sits among those of its launch, and the shape of a set of ranks. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["paceline", "torchrun", "slurm"]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One of the processes that start ranks: one per host, or one per rank where somebody else's launcher does that.

    Seat 0 leads: it says which ranks to start, when, and what for. The others follow.
    """

    number: int = 0
    seats: int = 1
    ranks: int | None = None
    """Ranks that a seat starts: 1 where a launcher starts a process per rank, None where the user says how many."""
    master: str | None = None
    """ADDRESS:PORT where seat 0 waits for the others; None on one host, and under torchrun, which has such a place."""
    local_rank: int = 0
    """This seat among those of its host, where each is a rank."""
    local_size: int = 1
    """Seats of its host, where each is a rank."""
    launcher: Launcher = "paceline"


@dataclass(frozen=True, order=True)
class Shape:
    """How many ranks, and over how many hosts."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.hosts * self.ranks_per_host

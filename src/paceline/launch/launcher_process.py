"""Where a process that starts ranks sits among those of its launch, and the shape of a set of ranks. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

StartedBy = Literal["paceline", "torchrun", "slurm"]
Notify = Callable[[str], None]
"""Tells the user one thing."""


@dataclass(frozen=True, kw_only=True)
class LauncherProcess:
    """One of the processes that start ranks: one per host, or one per rank where somebody else's launcher does that.

    Seat 0 leads: it says which ranks to start, when, and what for. The others follow.
    """

    number: int = 0
    launchers: int = 1
    ranks: int | None = None
    """Ranks that a seat starts: 1 where a launcher starts a process per rank, None where the user says how many."""
    master: str | None = None
    """ADDRESS:PORT where seat 0 waits for the others; None on one host, and under torchrun, which has such a place."""
    node: int = 0
    """The host it is on, as its launcher counts them."""
    local_rank: int = 0
    """This seat among those of its host, where each is a rank."""
    local_size: int = 1
    """Seats of its host, where each is a rank."""
    started_by: StartedBy = "paceline"

    @property
    def leads(self) -> bool:
        """Whether it says what is to be done."""
        return self.number == 0

    @property
    def hosts(self) -> int:
        """Hosts of the launch."""
        return self.launchers if self.ranks is None else self.launchers // self.local_size


@dataclass(frozen=True)
class LauncherInfo:
    """What a process that starts ranks says of itself."""

    launcher: int
    node: int
    local_rank: int
    host: str
    network: str
    address: str
    """Where the others reach its host."""
    versions: dict[str, str]
    cores: list[int]
    """Those that it may use."""
    settings: dict[str, Any]
    """What it was asked to do."""

    @property
    def name(self) -> str:
        """How to tell a user which host it is."""
        return f"host {self.node} ({self.host})"


@dataclass(frozen=True, order=True)
class Shape:
    """How many ranks, and over how many hosts."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class RankRange:
    """What one seat does of a job: the ranks that it starts."""

    launcher: int
    number: int
    """Among the parts of the job; ranks are counted in this order."""
    rank_ranges: int
    ranks: int
    local_rank: int
    """Of the first of its ranks, among all of its host."""
    local_size: int
    sharing: int
    """Ranks that share its cores: all of its host, unless each is bound to cores of its own."""

    @property
    def first_rank(self) -> int:
        """The first of the ranks it starts; all parts of a job start as many."""
        return self.number * self.ranks

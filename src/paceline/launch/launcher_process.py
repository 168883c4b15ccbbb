"""Launcher processes, and the number and placement of the ranks that they start. Free of torch.

A launcher process starts ranks. There is one per host, or one per rank under torchrun and Slurm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

StartedBy = Literal["paceline", "torchrun", "slurm"]
Notify = Callable[[str], None]
"""Function that shows one message to the user."""


@dataclass(frozen=True, kw_only=True)
class LauncherProcess:
    """Position of this process among the launcher processes.

    Launcher 0 is the leader: it decides which ranks to start, when, and for which job. All others are followers.
    """

    number: int = 0
    """Index of this launcher, from 0."""
    launchers: int = 1
    """Number of launcher processes."""
    ranks: int | None = None
    """Ranks that each launcher starts: 1 under torchrun and Slurm, None where `--ranks` decides."""
    master: str | None = None
    """ADDRESS:PORT on which launcher 0 listens; None on one host, and under torchrun, which provides a store."""
    node: int = 0
    """Index of the host, in the numbering of the program that started this launcher."""
    local_rank: int = 0
    """Index of this launcher on its host, where each launcher starts one rank."""
    local_size: int = 1
    """Number of launchers on this host, where each launcher starts one rank."""
    started_by: StartedBy = "paceline"

    @property
    def is_leader(self) -> bool:
        """Whether this launcher is the leader."""
        return self.number == 0

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.launchers if self.ranks is None else self.launchers // self.local_size


@dataclass(frozen=True)
class LauncherInfo:
    """Properties of a launcher process, exchanged in the handshake.

    Another version may have sent an info without some of the fields; these have an empty value.
    """

    launcher: int = 0
    node: int = 0
    local_rank: int = 0
    host: str = "unknown"
    network: str = ""
    """Identifier of the network namespace; equal for processes that share a network stack."""
    address: str = ""
    """Address at which other hosts reach its host."""
    versions: dict[str, str] = field(default_factory=dict)
    cores: list[int] = field(default_factory=list)
    """Cores that it may use."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings from its command line and configuration file."""

    @property
    def name(self) -> str:
        """Name of its host in messages."""
        return f"host {self.node} ({self.host})"


@dataclass(frozen=True, order=True)
class Shape:
    """Number of hosts, and of ranks on each."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """World size."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class RankRange:
    """Consecutive ranks of a job that one launcher starts."""

    launcher: int
    group_rank: int
    """Index of this range in the job; ranks are numbered in this order."""
    group_world_size: int
    """Number of ranges in the job; all have the same number of ranks."""
    ranks: int
    local_rank: int
    """Local rank, on its host, of the first rank of this range."""
    local_size: int
    """Ranks of the job on this host."""
    ranks_on_cores: int
    """Ranks that share this launcher's cores: all ranks of the host, unless each is bound to separate cores."""

    @property
    def first_rank(self) -> int:
        """Global rank of the first rank of this range."""
        return self.group_rank * self.ranks

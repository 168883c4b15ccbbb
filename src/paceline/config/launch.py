"""`LaunchConfig`: how many ranks, on which hosts, and how the hosts find each other."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from paceline.config.emulation import EmulationInfo, parse_hosts
from paceline.config.setting import NOT_NEGATIVE, POSITIVE, Bound, CommandName, check_values, option_name, setting
from paceline.errors import UsageError
from paceline.formatting import short

DEFAULT_CPU_RANKS = 2
"""Ranks on a real host without a GPU, unless the user gives a number: enough to measure synchronisation."""
EXPERIMENTS: tuple[CommandName, ...] = ("compare", "scale", "batch", "large-batch", "race", "doctor")
"""Commands that leave out or report what fails, and write no checkpoints."""
CORES = Bound("from 0.01 to 1024 cores", lambda value: 0.01 <= value <= 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Number of ranks, the hosts they run on, and how the hosts connect."""

    ranks: int | None = setting(None, bound=POSITIVE)
    """World size: ranks on all hosts together [default: on each host one per GPU, or 2 on a CPU; 1 for `single` and on
    each host of --emulate]."""
    ranks_per_host: int | None = setting(None, bound=POSITIVE, in_place_of="ranks")
    """Ranks on each host, in place of --ranks [default: 1 on emulated hosts]."""
    hosts: int = setting(1, bound=POSITIVE)
    """Number of hosts; start the same command on each, with its own --node-rank."""
    node_rank: int = setting(0, per_host=True)
    """Number of this host, from 0; host 0 is the one that --master names."""
    master: str | None = setting(None, per_host=True)
    """ADDRESS:PORT of host 0, to which all hosts connect [default: a free port on the loopback address]."""
    token_file: str | None = setting(None, per_host=True)
    """File with the token that all hosts share, readable by you alone (mode 0600); host 0 creates it if it is missing
    [default: the variable PACELINE_TOKEN; none is needed on one host]."""
    iface: str | None = setting(None, per_host=True)
    """Network interface to use on this host [default: the one on the route to the master]."""
    threads: int | None = setting(None, bound=POSITIVE, per_host=True)
    """CPU threads per rank [default: usable cores ÷ ranks on the host]."""
    emulate: str = ""
    """Emulate hosts on this machine, with one rank each: 4, 4@200mbit, 4@200mbit+5ms or 2@1gbit,2@100mbit; needs
    root."""
    host_cpus: float | None = setting(None, bound=CORES)
    """Cores that the ranks of each emulated host share, for example 0.5 [default: no limit]."""
    max_restarts: int = setting(0, bound=NOT_NEGATIVE, unused_by=EXPERIMENTS)
    """Start all ranks again, up to this many times, if a rank fails or is killed. The run goes on from its newest
    checkpoint, or from its beginning if there is none."""
    min_hosts: int | None = setting(None, bound=POSITIVE, unused_by=EXPERIMENTS)
    """Fewest hosts to go on with if others are lost; the global batch stays. Needs --max-restarts and --ranks-per-host
    [default: all hosts]."""
    grace: float = setting(30.0, bound=POSITIVE, unused_by=EXPERIMENTS, needs="checkpoint_every")
    """Seconds in which the ranks of a run with checkpoints can write one and end after SIGTERM or SIGUSR1."""

    def __post_init__(self) -> None:
        check_values(self)
        self._check_emulation()
        self._check_restarts()
        if not 0 <= self.node_rank < self.hosts:
            raise UsageError(
                f"--node-rank {self.node_rank} is not one of {self.hosts} hosts.",
                hint=f"hosts are numbered from 0 to {self.hosts - 1}",
            )
        if self.ranks is not None and self.ranks % self.hosts:
            raise UsageError(
                f"{self.ranks} ranks do not divide over {self.hosts} hosts.",
                hint="--ranks is the world size, a multiple of --hosts; or give --ranks-per-host",
            )
        both = self.ranks is not None and self.ranks_per_host is not None
        if both and self.ranks != (self.ranks_per_host or 0) * self.hosts:
            raise UsageError(
                f"--ranks {self.ranks} is not {self.hosts} hosts × --ranks-per-host {self.ranks_per_host}.",
                hint="give one of the two",
            )

    def _check_restarts(self) -> None:
        if self.min_hosts is None:
            return
        if not self.max_restarts:
            raise UsageError(
                f"--min-hosts {self.min_hosts} was given without --max-restarts.",
                hint="say how often the run may start again, as in --max-restarts 3",
            )
        if self.ranks_per_host is None:
            raise UsageError(
                f"--min-hosts {self.min_hosts} was given without --ranks-per-host.",
                hint="fewer hosts mean fewer ranks: give the ranks of each host with --ranks-per-host",
            )

    def _check_emulation(self) -> None:
        if self.host_cpus is not None and not self.emulate:
            raise UsageError(
                f"--host-cpus {short(self.host_cpus)} was given without --emulate.",
                hint="it limits the cores of emulated hosts, as in --emulate 4 --host-cpus 0.5",
            )
        if not self.emulate:
            return
        hosts = len(parse_hosts(self.emulate))
        other = {"hosts": self.hosts != 1, "node_rank": self.node_rank != 0, "master": self.master, "iface": self.iface}
        given = [name for name, value in other.items() if value]
        if given:
            option = option_name(LaunchConfig, given[0])
            raise UsageError(
                f"--emulate and {option} were both given.",
                hint=f"leave {option} out: --emulate starts all hosts on this machine and gives them addresses",
            )
        self.on_emulated_host(EmulationInfo(spec=self.emulate, host=0, hosts=hosts, master="198.18.0.1:1"))

    def on_emulated_host(self, info: EmulationInfo) -> LaunchConfig:
        """Return the launch config of one emulated host of this launch."""
        return replace(self, emulate="", host_cpus=None, hosts=info.hosts, node_rank=info.host, master=info.master)

    def local_ranks(self, default: int) -> int:
        """Return the ranks on this host; `default` if the user gave no number."""
        if self.ranks is not None:
            return self.ranks // self.hosts
        return self.ranks_per_host or default


def launched() -> bool:
    """Whether a launcher (ours, torchrun) started this process and set its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ

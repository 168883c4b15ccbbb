"""Faults that the endurance test injects into a run on emulated hosts."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.launch.emulation.hosts import EmulatedHost

RANK_MODULE = "paceline.launch.rank"


@dataclass
class RunningHost:
    """A host with its launcher."""

    host: EmulatedHost
    launcher: subprocess.Popen[Any]
    output: Path
    is_in_run: bool = True
    """False after it was lost: the run does not take it back."""
    is_cut_off: bool = False

    @property
    def ranks(self) -> list[psutil.Process]:
        """Processes of its ranks."""
        try:
            children = psutil.Process(self.launcher.pid).children(recursive=True)
            return [child for child in children if RANK_MODULE in child.cmdline()]
        except psutil.NoSuchProcess:
            return []

    def set_link(self, state: str) -> None:
        """Cut the host's link (`down`), or repair it (`up`)."""
        self.host.run("ip", "link", "set", "eth0", state)
        self.is_cut_off = state == "down"


@dataclass(frozen=True)
class Victims:
    """Hosts of a run, and the folder in which its workload looks for orders to fail."""

    hosts: Sequence[RunningHost]
    ledger: Path
    random: random.Random

    @property
    def in_run(self) -> list[RunningHost]:
        """Hosts that take part."""
        return [host for host in self.hosts if host.is_in_run]

    def rank(self) -> psutil.Process:
        """Return the process of any rank."""
        return self.random.choice([rank for host in self.in_run for rank in host.ranks])

    def follower(self) -> RunningHost:
        """Return any host except host 0."""
        return self.random.choice(self.in_run[1:])


@dataclass(frozen=True)
class FaultKind:
    """A way to break a run."""

    name: str
    inject: Callable[[Victims], None]
    named_as: re.Pattern[str]
    """Pattern of the message that names the fault."""
    weight: int = 1
    """Frequency, relative to that of other kinds."""
    hosts: int = 1
    """Hosts that must take part in the run."""
    ends_run: bool = False
    """Whether the command ends, and goes on when it is started again."""
    may_heal: bool = False
    """Whether the run may go on without a restart."""


def _kill_rank(victims: Victims) -> None:
    victims.rank().kill()


def _stop_rank(victims: Victims) -> None:
    victims.rank().suspend()


def _order(how: str) -> Callable[[Victims], None]:
    def order(victims: Victims) -> None:
        ranks = len([rank for host in victims.in_run for rank in host.ranks])
        (victims.ledger / f"{how}-{victims.random.randrange(ranks)}").touch()

    return order


def _kill_host(victims: Victims) -> None:
    host = victims.follower()
    host.launcher.kill()
    host.is_in_run = False


def _cut_link(victims: Victims) -> None:
    host = victims.follower()
    host.set_link("down")
    host.is_in_run = False


def _interrupt_link(victims: Victims) -> None:
    host = victims.follower()
    host.set_link("down")
    time.sleep(victims.random.uniform(0.5, 3))
    host.set_link("up")


def _kill_host_0(victims: Victims) -> None:
    victims.hosts[0].launcher.kill()


def _signal(number: signal.Signals) -> Callable[[Victims], None]:
    def send(victims: Victims) -> None:
        victims.random.choice(victims.in_run).launcher.send_signal(number)

    return send


KINDS = (
    FaultKind("a rank is killed", _kill_rank, re.compile(r"rank \d+ was killed by SIGKILL"), weight=6),
    FaultKind("a rank is stopped", _stop_rank, re.compile(r"rank \d+ .*stopped|SIGSTOP"), weight=3),
    FaultKind("a rank raises an exception", _order("raise"), re.compile("the endurance test made"), weight=3),
    FaultKind("a rank sleeps", _order("sleep"), re.compile(r"endurance_workload\.py"), weight=3),
    FaultKind("a host is killed", _kill_host, re.compile(r"lost contact with host \d"), weight=3, hosts=2),
    FaultKind("a host's link is cut", _cut_link, re.compile(r"lost contact with host \d"), weight=2, hosts=2),
    FaultKind("a link is interrupted for up to 3 s", _interrupt_link, re.compile(""), weight=2, hosts=2, may_heal=True),
    FaultKind("host 0 is killed", _kill_host_0, re.compile("lost the connection to host 0"), hosts=2, ends_run=True),
    FaultKind("SIGTERM", _signal(signal.SIGTERM), re.compile("the run was asked to stop"), weight=2, ends_run=True),
    FaultKind("SIGUSR1", _signal(signal.SIGUSR1), re.compile("the run was asked to stop"), ends_run=True),
)


def choose(victims: Victims) -> FaultKind:
    """Return a kind that the run, with the hosts that it has left, can have."""
    possible = [kind for kind in KINDS if kind.hosts <= len(victims.in_run)]
    return victims.random.choices(possible, [kind.weight for kind in possible])[0]

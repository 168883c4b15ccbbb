"""Emulated hosts on this machine: each has its own network and host name, and, if asked, its share of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.emulation import CGROUP_VARIABLE, EmulationInfo, parse_hosts
from paceline.errors import LaunchError
from paceline.launch.emulation.cgroup import cpu_shares
from paceline.launch.emulation.namespaces import Namespace, new_namespace
from paceline.launch.emulation.network import address_of, connect

MASTER_PORT = 29500
"""Any will do: nobody else is in a network that was made a moment ago."""


@dataclass(frozen=True)
class EmulatedHost:
    """An emulated host, to run programs on."""

    place: EmulationInfo
    namespace: Namespace
    cgroup: Path | None
    """The cgroup that its ranks enter, where the host has a share of the cores."""

    @property
    def address(self) -> str:
        """Its address, which all hosts of the emulation reach."""
        return address_of(self.place.host)

    def popen(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Starts a program on it (`subprocess.Popen`), which ends with this process, whatever ends that.

        `paceline` commands with `--emulate` know by their environment that they are on an emulated host. Other programs
        do not enter the host's cgroup: only ranks do.
        """
        return self.namespace.popen(*command, env=self._environment(env), **options)

    def run(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Runs a program on it to its end; returns a `subprocess.CompletedProcess` with what it printed."""
        return self.namespace.run(*command, env=self._environment(env), **options)

    def _environment(self, given: Mapping[str, str] | None) -> dict[str, str]:
        cgroup = {} if self.cgroup is None else {CGROUP_VARIABLE: str(self.cgroup)}
        return {**(os.environ if given is None else given), **self.place.variables(), **cgroup}


@contextmanager
def emulated_hosts(spec: str, host_cpus: float | None = None) -> Iterator[Sequence[EmulatedHost]]:
    """Makes the hosts that `spec` (as 4@200mbit) names, connected, and takes them away at the end.

    `host_cpus` is the share of the cores that the ranks of each get. Who starts programs there ends them before; at the
    latest they end with this process. Everything is without a name that others could meet, so any number of
    emulations can be there at once, and the kernel itself takes the networks away if this process is killed.

        with emulated_hosts("1@100mbit,1@1gbit") as (slow, fast):
            server = slow.popen("iperf3", "-s", "-1")
            print(fast.run("iperf3", "-c", slow.address).stdout)
    """
    if sys.platform != "linux":
        raise LaunchError("hosts can be emulated on Linux only.", hint="use --ranks, or a virtual machine with Linux")
    lines = parse_hosts(spec)
    with ExitStack() as stack:
        namespaces = []
        addresses = {f"host{number}": address_of(number) for number in range(len(lines))}
        for name in ("switch", *addresses):
            namespaces.append(new_namespace(name, addresses))
            stack.callback(namespaces[-1].close)
        switch, *networks = namespaces
        connect(switch, networks, lines)
        cgroups: Sequence[Path | None] = [None] * len(lines)
        if host_cpus is not None:
            cgroups = stack.enter_context(cpu_shares(len(lines), host_cpus))
        master = f"{address_of(0)}:{MASTER_PORT}"
        places = [
            EmulationInfo(spec=spec, host=number, hosts=len(lines), master=master, host_cpus=host_cpus)
            for number in range(len(lines))
        ]
        yield [EmulatedHost(*parts) for parts in zip(places, networks, cgroups, strict=True)]

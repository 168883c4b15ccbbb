"""Emulated hosts on this machine: each has a separate network and host name, and optionally a CPU limit."""

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
from paceline.launch.emulation.cgroup import host_cgroups
from paceline.launch.emulation.namespaces import Namespace, new_namespace
from paceline.launch.emulation.network import address_of, connect

MASTER_PORT = 29500
"""Port on which host 0 listens; every port is free in a new network."""


@dataclass(frozen=True)
class EmulatedHost:
    """Emulated host on which programs can be started."""

    emulation: EmulationInfo
    namespace: Namespace
    cgroup: Path | None
    """Cgroup that its ranks enter; None if the host has no CPU limit."""

    @property
    def address(self) -> str:
        """Address at which all hosts of the emulation can reach it."""
        return address_of(self.emulation.host)

    def popen(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host (`subprocess.Popen`); the kernel kills it when this process ends.

        The environment marks the host, so that a `paceline` command with `--emulate` runs here as on a real host. Only
        ranks enter the host's cgroup, not the program itself.
        """
        return self.namespace.popen(*command, env=self._environment(env), **options)

    def run(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Run a program on this host; return a `subprocess.CompletedProcess` with its output."""
        return self.namespace.run(*command, env=self._environment(env), **options)

    def _environment(self, given: Mapping[str, str] | None) -> dict[str, str]:
        cgroup = {} if self.cgroup is None else {CGROUP_VARIABLE: str(self.cgroup)}
        return {**(os.environ if given is None else given), **self.emulation.variables(), **cgroup}


@contextmanager
def emulated_hosts(spec: str, host_cpus: float | None = None) -> Iterator[Sequence[EmulatedHost]]:
    """Create connected hosts as in `spec`, for example 4@200mbit, for the duration of a `with` block.

    `host_cpus` limits the ranks of each host to a number of cores. Stop programs on the hosts before the block ends;
    the kernel kills the rest when this process ends. The networks have no names, so several emulations can run at the
    same time, and the kernel removes the networks if this process is killed.

        with emulated_hosts("1@100mbit,1@1gbit") as (slow, fast):
            server = slow.popen("iperf3", "-s", "-1")
            print(fast.run("iperf3", "-c", slow.address).stdout)
    """
    if sys.platform != "linux":
        raise LaunchError(
            "emulated hosts are supported on Linux only.",
            hint="use --ranks without --emulate, or run in a virtual machine with Linux",
        )
    specs = parse_hosts(spec)
    with ExitStack() as stack:
        namespaces = []
        addresses = {f"host{number}": address_of(number) for number in range(len(specs))}
        for name in ("switch", *addresses):
            namespaces.append(new_namespace(name, addresses))
            stack.callback(namespaces[-1].close)
        switch, *networks = namespaces
        connect(switch, networks, specs)
        cgroups: Sequence[Path | None] = [None] * len(specs)
        if host_cpus is not None:
            cgroups = stack.enter_context(host_cgroups(len(specs), host_cpus))
        master = f"{address_of(0)}:{MASTER_PORT}"
        emulations = [
            EmulationInfo(spec=spec, host=number, hosts=len(specs), master=master, host_cpus=host_cpus)
            for number in range(len(specs))
        ]
        yield [EmulatedHost(*parts) for parts in zip(emulations, networks, cgroups, strict=True)]

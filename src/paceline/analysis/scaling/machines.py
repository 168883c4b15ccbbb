"""Cores of the ranks of a scaling experiment: hosts that share a machine, ranks that share cores or GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from paceline.analysis.core_sharing import CORE_TOLERANCE, format_quotas, format_sharing
from paceline.config.emulation import EmulatedHostSpec, parse_hosts
from paceline.errors import UsageError
from paceline.formatting import format_cores, plural
from paceline.records import Topology
from paceline.records.experiment.design import Candidate, CompareDesign, Design, PointsDesign


class HostPlacement(Protocol):
    """Machines of the hosts of an experiment."""

    @property
    def host_cpus(self) -> float | None:
        """Cores that the ranks of one emulated host share."""

    @property
    def machines(self) -> list[int]:
        """Number of the machine of each host."""

    @property
    def ranks_pinned(self) -> bool:
        """Whether a launcher bound ranks to cores."""


class MachineLayout(HostPlacement, Protocol):
    """Machines and cores of the hosts of an experiment: its design, or what is known before it."""

    @property
    def emulated(self) -> str | None:
        """Value of `--emulate`."""

    @property
    def machine_cores(self) -> float:
        """Cores of this machine."""


def machines_of(design: HostPlacement, hosts: int) -> list[int]:
    """Return the machine of each of the first `hosts` hosts; if the record lacks it, they share one machine."""
    return design.machines[:hosts] if len(design.machines) >= hosts else [0] * hosts


def max_ranks_sharing_cores(design: HostPlacement, hosts: int, ranks_per_host: int) -> int:
    """Return the largest number of ranks that share the same cores.

    Ranks share cores with all ranks on their machine, or only with those of their host if each host has a CPU quota. A
    rank that its launcher pinned to cores shares them with no other rank of its host.
    """
    if design.host_cpus is not None:
        return ranks_per_host
    return (1 if design.ranks_pinned else ranks_per_host) * max(Counter(machines_of(design, hosts)).values())


def cores_per_rank(topology: Topology, design: PointsDesign) -> float:
    """Return the cores that a rank can use; 1 on a GPU."""
    if topology.device != "cpu":
        return 1.0
    return float(min(topology.threads, topology.cores / _ranks_sharing_cores(topology, design)))


def unequal_cores(base: Candidate, base_topology: Topology, topology: Topology, design: PointsDesign) -> str:
    """Return a phrase on the cores of a baseline and of each rank of a point; empty if a rank has as many."""
    cores, base_cores = cores_per_rank(topology, design), cores_per_rank(base_topology, design)
    if abs(cores - base_cores) <= CORE_TOLERANCE * base_cores:
        return ""
    ranks = base.point.ranks if base.point is not None else 1
    baseline = (
        base.strategy if base.role == "baseline" else "one rank alone" if ranks == 1 else f"each of {ranks} ranks"
    )
    return f"{baseline} had {format_cores(base_cores)}, each of several ranks has {format_cores(cores)}"


def oversubscription(topology: Topology, design: PointsDesign) -> str:
    """Return a phrase on how ranks share cores or GPUs; empty if each rank has its own, or each host its quota."""
    ranks_together, quota = _ranks_sharing_cores(topology, design), design.host_cpus
    if topology.device != "cpu":
        gpus = design.gpus or ranks_together
        return f"{ranks_together} ranks share {gpus} GPU{'s' * (gpus > 1)}" if ranks_together > gpus else ""
    if quota is not None:
        return format_quotas(hosts_of(topology), quota, design.machine_cores)
    return format_sharing(ranks_together, topology.threads, topology.cores)


def planned_oversubscription(design: Design) -> str:
    """Return a phrase on how ranks will share cores where the most of them do; empty if each has its own."""
    if isinstance(design, PointsDesign):
        shapes = [(shape.hosts, shape.ranks_per_host) for shape in design.shapes]
    elif isinstance(design, CompareDesign):
        shapes = [(design.hosts, design.ranks_per_host)]
    else:
        return ""
    cores, quota = design.machine_cores, design.host_cpus
    if cores is None or design.gpus:
        return ""
    if quota is not None:
        most_hosts, on_host = max(hosts for hosts, _ in shapes), 0 if isinstance(design, PointsDesign) else shapes[0][1]
        # In experiments over points, ranks that share the quota of their host are compared with others that do.
        return format_quotas(most_hosts, quota, cores) or format_sharing(on_host, design.threads, quota)
    most = max(max_ranks_sharing_cores(design, hosts, on_host) for hosts, on_host in shapes)
    return format_sharing(most, design.threads, cores)


def _ranks_sharing_cores(topology: Topology, design: PointsDesign) -> int:
    return min(topology.workers, max_ranks_sharing_cores(design, hosts_of(topology), topology.ranks_per_host))


def hosts_of(topology: Topology) -> int:
    """Return the number of hosts of the ranks that train."""
    return -(-topology.workers // topology.ranks_per_host)


def is_packed(design: PointsDesign, hosts: int, ranks_per_host: int) -> bool:
    """Return whether ranks use fewer hosts than possible because their number does not divide evenly."""
    available = len(design.machines)
    return not design.requested_ranks_per_host and hosts < min(available, hosts * ranks_per_host)


def placement_notes(design: PointsDesign, shapes: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield notes on the placement of ranks for shapes (hosts, ranks per host)."""
    ordered = sorted(set(shapes), key=lambda shape: (shape[0] * shape[1], shape[0]))
    widest = {hosts * number: (hosts, number) for hosts, number in ordered}
    for hosts, number in widest.values():
        if is_packed(design, hosts, number):
            yield (
                f"{hosts * number} ranks cannot be placed evenly on {len(design.machines)} hosts, so they are "
                f"placed on {plural(hosts, 'host')}. Choose a placement with --ranks-per-host."
            )
    yield from _different_hosts(design, sorted({hosts for hosts, _ in ordered}))


def _different_hosts(design: PointsDesign, hosts: Sequence[int]) -> Iterator[str]:
    """Yield a note on which hosts were used, if emulated hosts differ and not all were used."""
    try:
        emulated = parse_hosts(design.emulated or "1")
    except UsageError:  # The record was edited, or a newer version wrote it.
        return
    fewer = [number for number in hosts if number < len(emulated)]
    if len(set(emulated)) > 1 and fewer:
        used = [f"{_first_hosts(number)} ({_format_hosts(emulated[:number])})" for number in fewer]
        yield (
            f"The emulated hosts differ, and runs on fewer hosts use the first of them: {'; '.join(used)}. "
            "Compare points on different numbers of hosts with care."
        )


def _first_hosts(hosts: int) -> str:
    return "1 host is host 0" if hosts == 1 else f"{hosts} hosts are hosts 0 to {hosts - 1}"


def _format_hosts(hosts: Sequence[EmulatedHostSpec]) -> str:
    """Return hosts by kind, as "2 at 1 Gbit/s each way, 1 at 100 Mbit/s each way"."""
    counted = Counter(hosts)
    return str(hosts[0]) if len(counted) == 1 else ", ".join(f"{number} {kind}" for kind, number in counted.items())

"""Over-subscription: more compute threads than cores. Decided here for commands, records, `scale` and the doctor."""

from __future__ import annotations

from paceline.formatting import format_cores, plural
from paceline.records import Topology

CORE_TOLERANCE = 0.01
"""Relative difference up to which two numbers of cores count as equal."""


def is_over_subscribed(threads: int, cores: float) -> bool:
    """Return whether compute threads have to take turns on cores; a fraction of a core is enough for one thread."""
    return threads > max(1.0, cores)


def exceeds_cores(hosts: int, quota: float, cores: float) -> bool:
    """Return whether emulated hosts with a CPU quota each need more cores than their machine has."""
    return hosts * quota > cores * (1 + CORE_TOLERANCE)


def format_sharing(ranks: int, threads: int, cores: float) -> str:
    """Return a phrase on ranks that compute on the same cores, if they are over-subscribed; otherwise nothing."""
    if not is_over_subscribed(ranks * threads, cores):
        return ""
    if ranks == 1:
        return f"{plural(threads, 'thread')} of 1 rank share {format_cores(cores)}"
    each = f" with {plural(threads, 'thread')} each" if threads > 1 else ""
    return f"{plural(ranks, 'rank')}{each} share {format_cores(cores)}"


def format_quotas(hosts: int, quota: float, cores: float) -> str:
    """Return a phrase on emulated hosts whose quotas exceed the cores of their machine; otherwise nothing."""
    if not exceeds_cores(hosts, quota, cores):
        return ""
    return f"{plural(hosts, 'host')} with {format_cores(quota)} each share {format_cores(cores)}"


def sharing_in_run(topology: Topology, machine_cores: float | None = None) -> str:
    """Return a phrase on the over-subscribed cores of a run; empty if there are none.

    The ranks of all emulated hosts share the cores of one machine, unless each host has a CPU quota. Pass
    `machine_cores` to check that the quotas fit, since the topology has the cores of one host.
    """
    if topology.device != "cpu":
        return ""
    workers, on_host, emulated = topology.workers, topology.ranks_per_host, topology.emulated
    sharing = min(workers, on_host, topology.ranks_sharing_cores or on_host)
    quota = None if emulated is None else emulated.host_cpus
    if quota is not None and machine_cores is not None:
        return format_quotas(-(-workers // on_host), quota, machine_cores) or format_sharing(
            sharing, topology.threads, quota
        )
    together = workers if emulated is not None and quota is None else sharing
    return format_sharing(together, topology.threads, topology.cores)


def sharing_sentence(phrase: str) -> str:
    """Return the sentence on over-subscribed cores that commands, records and pages show; empty for no phrase."""
    if not phrase:
        return ""
    return f"{phrase}: they take turns, so times compare strategies on this machine but do not predict more machines."


def sharing_advice(topology: Topology) -> str:
    """Return the sentence on how to avoid over-subscription on the hosts of a run."""
    emulated = topology.emulated
    if emulated is None:
        return "Use fewer ranks or threads to give each rank its own core."
    if emulated.host_cpus is None:
        return "Use fewer hosts, or give each host a fixed share of the cores with --host-cpus."
    return "Use fewer hosts or ranks, or change --host-cpus."

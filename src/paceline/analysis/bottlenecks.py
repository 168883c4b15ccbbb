"""Bottlenecks of a candidate: the parts of its step that a user could reduce, each with its share.

The parts are those of the time split. Timelines, topology and the measured link divide them further: compute threads
without a core, data loading, waiting for a straggler, and transfers limited by latency or by bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.analysis.steps.candidate_split import CandidateSplit
from paceline.analysis.traffic.wire import Traffic, Wire, bus_factor
from paceline.records import Topology
from paceline.records.examination import PairLink
from paceline.records.timeline import MESSAGES, RowKind

BottleneckKind = Literal[
    "compute", "cores", "data", "straggler", "uneven_ranks", "latency", "bandwidth", "memory", "exchange", "other"
]

NOTABLE = 0.05
"""Smallest share of a step that is reported."""
STRAGGLER_SHARE = 0.6
STRAGGLER_SHARE_OF_TWO = 0.8
"""Share of all waiting from which one rank is reported as the straggler. With two ranks, one of them always has at
least half, so the threshold is higher."""
SMALL_BYTES = 100_000
"""Without a measured link, smaller messages are assumed to be limited by latency, not bandwidth."""


@dataclass(frozen=True)
class Bottleneck:
    """One part of a step that takes time."""

    kind: BottleneckKind
    share: float
    """Share of the step, averaged over ranks."""
    seconds: float
    facts: Mapping[str, Any]
    """Values for the sentence about it; the keys depend on `kind`."""


def bottlenecks(
    split: CandidateSplit, wire: Wire | None, topology: Topology, link: PairLink | None
) -> list[Bottleneck]:
    """Return the parts that a step's time goes to, largest first, without those below `NOTABLE`."""
    step_s = split.mean.step_s
    descheduled_s = min(split.mean.descheduled_s or 0.0, split.mean.computing_s)
    wait_s = _wait_s(split, wire)
    found = [
        _cores(descheduled_s, topology),
        Bottleneck("compute", 0.0, split.mean.computing_s - descheduled_s, {"overlapped_s": split.mean.overlapped_s}),
        Bottleneck("data", 0.0, split.mean.data_s, {}),
        Bottleneck("other", 0.0, max(0.0, split.mean.other_s - split.mean.data_s), {}),
    ]
    if wire is not None:
        found.append(_waiting(wait_s, wire))
        found.append(_transfers(split.mean.exposed_s - wait_s, wire, link))
    else:  # Asynchronous ranks: their operations cannot be matched, so waits and transfers are not separable.
        found.append(Bottleneck("exchange", 0.0, split.mean.exposed_s, {}))
    shared = [Bottleneck(part.kind, part.seconds / step_s, part.seconds, part.facts) for part in found]
    return sorted((part for part in shared if part.share >= NOTABLE), key=lambda part: -part.share)


def _wait_s(split: CandidateSplit, wire: Wire | None) -> float:
    """Return the part of exposed communication that is waiting, by its share in the run that `wire` describes."""
    if wire is None or not wire.exposed_s:
        return 0.0
    return split.mean.exposed_s * min(1.0, (wire.wait_s or 0.0) / wire.exposed_s)


def threads_per_core(topology: Topology) -> float | None:
    """Return compute threads per usable core of a host; None on a GPU."""
    if topology.device != "cpu":
        return None
    return min(topology.workers, topology.ranks_per_host) * topology.threads / topology.cores


def _cores(descheduled_s: float, topology: Topology) -> Bottleneck:
    facts = {
        "threads_per_core": threads_per_core(topology),
        "ranks": min(topology.workers, topology.ranks_per_host),
        "threads": topology.threads,
        "cores": topology.cores,
    }
    return Bottleneck("cores", 0.0, descheduled_s, facts)


def _waiting(wait_s: float, wire: Wire) -> Bottleneck:
    """Return the waiting as caused by one straggler, or by several ranks in turn."""
    rank = wire.straggler
    share = wire.waited_for.get(rank, 0.0) if rank is not None else 0.0
    threshold = STRAGGLER_SHARE_OF_TWO if wire.ranks == 2 else STRAGGLER_SHARE
    kind: BottleneckKind = "straggler" if share >= threshold else "uneven_ranks"
    return Bottleneck(kind, 0.0, wait_s, {"rank": rank, "wait_share": share})


def _transfers(transfer_s: float, wire: Wire, link: PairLink | None) -> Bottleneck:
    """Return transfers as limited by latency or by bandwidth, whichever costs more on the measured link."""
    on_wire_s = sum(traffic.per_step * traffic.duration_s for traffic in wire.traffic)
    in_memory = [traffic for traffic in wire.traffic if traffic.kind == RowKind.SHARED_REDUCE.title]
    if sum(traffic.per_step * traffic.duration_s for traffic in in_memory) > on_wire_s / 2:
        added = sum(traffic.bytes_per_step for traffic in in_memory)
        return Bottleneck("memory", 0.0, max(0.0, transfer_s), {"bytes": added})
    operations = sum(traffic.per_step for traffic in wire.traffic)
    carried = sum(traffic.bytes_per_step for traffic in wire.traffic)
    each = carried / operations if operations else 0.0
    latency_s = bandwidth_s = None
    is_latency_bound = each < SMALL_BYTES
    cost = None if link is None else link_cost(wire, link)
    if cost is not None and sum(cost) <= on_wire_s:  # Otherwise the link was busy when it was measured.
        latency_s, bandwidth_s = cost
        is_latency_bound = latency_s > bandwidth_s
    facts = {
        "operations": operations,
        "bytes_each": each,
        "bytes": wire.busiest_bytes,
        "waits_known": wire.wait_s is not None,
        "within_host": link is not None and link.within_host,
        "latency_s": latency_s,
        "bandwidth_s": bandwidth_s,
    }
    return Bottleneck("latency" if is_latency_bound else "bandwidth", 0.0, max(0.0, transfer_s), facts)


def link_cost(wire: Wire, link: PairLink) -> tuple[float, float]:
    """Return the latency and bandwidth cost of a step's operations on an idle link, in seconds, by the α–β model."""
    latency_s = link.alpha_s * sum(rounds(traffic, wire.ranks) * traffic.per_step for traffic in wire.traffic)
    bandwidth_s = link.beta_s_per_byte * sum(on_busiest_link(traffic, wire.ranks) for traffic in wire.traffic)
    return latency_s, bandwidth_s


def rounds(traffic: Traffic, ranks: int) -> float:
    """Return the number of consecutive messages in an operation as Gloo implements it."""
    if traffic.kind in (RowKind.ALL_REDUCE.title, RowKind.REDUCE_SCATTER.title):
        return 2 * (ranks - 1)
    if traffic.kind in (RowKind.BROADCAST.title, RowKind.REDUCE.title, RowKind.BARRIER.title):
        return math.ceil(math.log2(ranks)) if ranks > 1 else 0
    if traffic.kind == RowKind.SHARED_REDUCE.title:
        return 0
    return 1 if traffic.kind in [kind.title for kind in MESSAGES] else ranks - 1


def on_busiest_link(traffic: Traffic, ranks: int) -> float:
    """Return the bytes per step on the busiest link."""
    if traffic.kind == RowKind.SHARED_REDUCE.title:
        return 0.0
    return traffic.bytes_per_step * bus_factor(RowKind[traffic.kind.upper()], ranks)

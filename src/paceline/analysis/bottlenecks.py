"""What limits a candidate: the parts of its step that something could be done about, each with its share.

The parts are those of the time split, cut finer where the timelines, the machine and the link tell more: computing that
had no core, data, waiting for a rank that comes late, and transfers, which cost latency or bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.analysis.steps.candidate_split import CandidateSplit
from paceline.analysis.traffic.wire import Traffic, Wire, bus_factor
from paceline.records.examination import PairLink
from paceline.records.timeline import RowKind

BottleneckKind = Literal[
    "compute", "cores", "data", "slow_rank", "uneven_ranks", "latency", "bandwidth", "memory", "exchange", "other"
]

NOTABLE = 0.05
"""Parts below this share of a step are not worth a sentence."""
ONE_TO_BLAME = 0.6
ONE_OF_TWO_TO_BLAME = 0.8
"""From this share of all waiting on, one rank is said to be the one that the others wait for; of two ranks one always
has half of it."""
SMALL_BYTES = 100_000
"""Without a measured link: messages below this are taken to cost latency rather than bandwidth."""


@dataclass(frozen=True)
class Bottleneck:
    """One thing that a step's time goes to."""

    kind: BottleneckKind
    share: float
    """Of the step, on average over the ranks."""
    seconds: float
    facts: Mapping[str, Any]
    """What the sentence about it needs: see where each is made."""


def bottlenecks(
    split: CandidateSplit, wire: Wire | None, topology: Mapping[str, Any], link: PairLink | None
) -> list[Bottleneck]:
    """What the step's time goes to, largest first; parts that are not notable are left out."""
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
    else:  # As where ranks do not step together: what each did cannot be held against what the others did.
        found.append(Bottleneck("exchange", 0.0, split.mean.exposed_s, {}))
    shared = [Bottleneck(limit.kind, limit.seconds / step_s, limit.seconds, limit.facts) for limit in found]
    return sorted((limit for limit in shared if limit.share >= NOTABLE), key=lambda limit: -limit.share)


def _wait_s(split: CandidateSplit, wire: Wire | None) -> float:
    """What of the exposed communication is waiting: by the share that it has in the run that the wire is of."""
    if wire is None or not wire.exposed_s:
        return 0.0
    return split.mean.exposed_s * min(1.0, (wire.wait_s or 0.0) / wire.exposed_s)


def crowding(topology: Mapping[str, Any]) -> float | None:
    """Threads that compute on a host ÷ its usable cores; None on a GPU."""
    cores, threads = topology.get("cores"), topology.get("threads")
    if not cores or not threads or topology.get("device") != "cpu":
        return None
    busy = min(int(topology["workers"]), int(topology.get("ranks_per_host") or topology["workers"]))
    return float(busy * threads / cores)


def _cores(descheduled_s: float, topology: Mapping[str, Any]) -> Bottleneck:
    facts = {
        "crowding": crowding(topology),
        "ranks": min(topology["workers"], topology.get("ranks_per_host") or topology["workers"]),
        "threads": topology.get("threads"),
        "cores": topology.get("cores"),
    }
    return Bottleneck("cores", 0.0, descheduled_s, facts)


def _waiting(wait_s: float, wire: Wire) -> Bottleneck:
    """Waiting for one rank, or for now this one and now that."""
    rank = wire.held_up_by
    share = wire.waited_for.get(rank, 0.0) if rank is not None else 0.0
    enough = ONE_OF_TWO_TO_BLAME if wire.ranks == 2 else ONE_TO_BLAME
    kind: BottleneckKind = "slow_rank" if share >= enough else "uneven_ranks"
    return Bottleneck(kind, 0.0, wait_s, {"rank": rank, "blame": share})


def _transfers(transfer_s: float, wire: Wire, link: PairLink | None) -> Bottleneck:
    """Transfers, by what the greater part of them would cost on the measured link."""
    on_wire_s = sum(traffic.per_step * traffic.duration_s for traffic in wire.traffic)
    in_memory = [traffic for traffic in wire.traffic if traffic.kind == RowKind.SHARED_REDUCE.title]
    if sum(traffic.per_step * traffic.duration_s for traffic in in_memory) > on_wire_s / 2:
        added = sum(traffic.bytes_per_step for traffic in in_memory)
        return Bottleneck("memory", 0.0, max(0.0, transfer_s), {"bytes": added})
    operations = sum(traffic.per_step for traffic in wire.traffic)
    carried = sum(traffic.bytes_per_step for traffic in wire.traffic)
    each = carried / operations if operations else 0.0
    latency_s = bandwidth_s = None
    slow_start = each < SMALL_BYTES
    cost = None if link is None else link_cost(wire, link)
    if cost is not None and sum(cost) <= on_wire_s:  # Else the link was busy when it was measured.
        latency_s, bandwidth_s = cost
        slow_start = latency_s > bandwidth_s
    facts = {
        "operations": operations,
        "bytes_each": each,
        "bytes": wire.busiest_bytes,
        "waiting_known": wire.wait_s is not None,
        "within_host": link is not None and link.within_host,
        "latency_s": latency_s,
        "bandwidth_s": bandwidth_s,
    }
    return Bottleneck("latency" if slow_start else "bandwidth", 0.0, max(0.0, transfer_s), facts)


def link_cost(wire: Wire, link: PairLink) -> tuple[float, float]:
    """What a step's operations cost on a link with nothing else to do, by the α–β model: latency, and bandwidth."""
    latency_s = link.alpha_s * sum(rounds(traffic, wire.ranks) * traffic.per_step for traffic in wire.traffic)
    bandwidth_s = link.beta_s_per_byte * sum(on_busiest_link(traffic, wire.ranks) for traffic in wire.traffic)
    return latency_s, bandwidth_s


def rounds(traffic: Traffic, ranks: int) -> float:
    """How many messages follow one another in an operation, by the α–β cost of how Gloo carries it out."""
    if traffic.kind in (RowKind.ALL_REDUCE.title, RowKind.REDUCE_SCATTER.title):
        return 2 * (ranks - 1)
    if traffic.kind in (RowKind.BROADCAST.title, RowKind.REDUCE.title, RowKind.BARRIER.title):
        return math.ceil(math.log2(ranks)) if ranks > 1 else 0
    if traffic.kind == RowKind.SHARED_REDUCE.title:
        return 0
    return 1 if traffic.kind in (RowKind.SEND.title, RowKind.RECV.title) else ranks - 1


def on_busiest_link(traffic: Traffic, ranks: int) -> float:
    """The bytes of a step that the busiest link has to carry."""
    if traffic.kind == RowKind.SHARED_REDUCE.title:
        return 0.0
    return traffic.bytes_per_step * bus_factor(RowKind[traffic.kind.upper()], ranks)

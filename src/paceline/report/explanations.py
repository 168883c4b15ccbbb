"""Explanations of a candidate's step time: what limits it, which share of the step that is, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.bottlenecks import Bottleneck, BottleneckKind, bottlenecks
from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.ranks import hub_rank
from paceline.config.slow_ranks import parse_slow_ranks
from paceline.formatting import format_cores, percent, plural, seconds, short_factor, size
from paceline.plans.halving_doubling import ALGORITHM as HALVING_DOUBLING
from paceline.plans.halving_doubling import folded
from paceline.records import Topology
from paceline.records.examination import PairLink
from paceline.records.settings import Settings
from paceline.records.summary import PlannedTraffic
from paceline.strategies.registry import option_names

MOST_REASONS = 3
MUCH_LONGER = 3.0
"""Ratio of transfer time to the idle link's time from which something other than the link is the cause."""

PART = {
    "compute": "compute",
    "cores": "descheduled",
    "data": "data",
    "straggler": "wait",
    "uneven_ranks": "wait",
    "latency": "exposed",
    "bandwidth": "exposed",
    "memory": "exposed",
    "exchange": "exposed",
    "other": "other",
}
"""Column of the time split that supports an explanation, by the kind of bottleneck."""


@dataclass(frozen=True)
class Reason:
    """One bottleneck of a candidate, in sentences."""

    candidate: str
    kind: BottleneckKind
    share: float
    text: str
    """Sentence on what was measured, with figures."""
    remedy: str
    """Suggestion of what would help; empty where an earlier reason already gives it."""
    anchor: str
    """HTML id of the table cell that supports it; see `anchor`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the reason as JSON data."""
        return {
            "candidate": self.candidate,
            "limit": self.kind,
            "share": self.share,
            "text": self.text,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class ExplainedCandidate:
    """Facts about one candidate that the sentences use."""

    row: CandidateRow
    topology: Topology
    config: Settings
    link: PairLink | None

    central_rank: int | None = None
    """Rank that all traffic passes through; None if there is no such rank."""
    algorithms: Sequence[str] = ()
    """Algorithms of the planned operations."""

    @property
    def lockstep(self) -> bool:
        """Whether ranks step together."""
        return self.topology.lockstep

    @property
    def folded(self) -> int:
        """Number of last ranks that hand their gradients to a partner, which then has twice the work."""
        return folded(self.topology.workers) if HALVING_DOUBLING.name in self.algorithms else 0

    @property
    def name(self) -> str:
        """Name of the strategy, without its options."""
        return self.row.candidate.strategy.partition(":")[0]

    @property
    def sends(self) -> str:
        """Way its gradients are sent, as the strategy declares it."""
        return self.topology.sends

    @property
    def overlaps(self) -> bool:
        """Whether its gradients are sent during backward."""
        return self.sends in ("overlapped", "overlapped_forward")


def anchor(comparison: Comparison, candidate: str, part: str) -> str:
    """Return the HTML id of a candidate's cell in the table of time splits."""
    names = [row.candidate.name for row in comparison.rows]
    return f"split-{names.index(candidate)}-{part}"


def explain(comparison: Comparison) -> list[Reason]:
    """Return the reasons of every candidate measured with events, in the order of the table, largest share first."""
    found = list[Reason]()
    for row in comparison.rows:
        if row.split is None or not row.is_measured:
            continue
        run = comparison.record_set.recorded_runs_of(row.candidate.name)[0].run
        traffic = run.summary.traffic if run.summary else None
        algorithms = traffic.algorithms if traffic else ()
        case = ExplainedCandidate(row, run.topology, run.config, _link(comparison), _central_rank(traffic), algorithms)
        parts = bottlenecks(row.split, comparison.wires.get(row.candidate.name), case.topology, case.link)
        for limit in [limit for limit in parts if limit.kind != "compute" or limit is parts[0]][:MOST_REASONS]:
            text, remedy = SENTENCES[limit.kind](limit, case)
            if limit.kind == "compute" and any(reason.kind == "compute" for reason in found):
                remedy = ""  # It is the same for all candidates.
            place = anchor(comparison, row.candidate.name, PART[limit.kind])
            found.append(Reason(row.candidate.name, limit.kind, limit.share, text, remedy, place))
    return found


def _central_rank(traffic: PlannedTraffic | None) -> int | None:
    """Return the rank that all planned traffic passes through; None without a plan or such a rank."""
    return hub_rank(traffic.sent_bytes, traffic.received_bytes) if traffic else None


def _link(comparison: Comparison) -> PairLink | None:
    examination = comparison.examination
    return examination.link.slowest if examination is not None and examination.link is not None else None


def _amount(limit: Bottleneck, case: ExplainedCandidate) -> str:
    """Return the share and the seconds; of a rank's own step where ranks do not step together."""
    step = "the step" if case.lockstep else "a rank's own step"
    return f"{percent(limit.share, 0)} of {step} ({seconds(limit.seconds)})"


def _compute(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    hidden_s = limit.facts["overlapped_s"]
    overlap = f", {seconds(hidden_s)} of it while gradients are being sent" if hidden_s > 0.01 * limit.seconds else ""
    text = f"{_amount(limit, case)} is computing{overlap}."
    plain = case.config.get("precision") in (None, "fp32") and not case.config.get("channels_last")
    is_chosen = case.topology.precision_choice is not None
    cheaper = "--precision auto, which takes bf16 if the processor is faster in it; " if plain and not is_chosen else ""
    return text, f"{cheaper}faster or more processors. Another strategy cannot reduce this part."


def _cores(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    facts = limit.facts
    lost = f"{_amount(limit, case)} is lost because the compute thread was descheduled"
    if facts["cores"] is not None and facts["cores"] < 1 and facts["ranks"] == 1:
        return f"{lost}: its host has {format_cores(facts['cores'])}.", "more cores."
    if facts["threads_per_core"] is not None and facts["threads_per_core"] > 1:
        threads = f"{plural(facts['ranks'], 'rank')} × {plural(facts['threads'], 'thread')}"
        text = f"{lost}: {threads} are too many for {format_cores(facts['cores'])}."
        fewer = max(1, int(facts["cores"] // facts["threads"]))
        return text, f"--ranks {fewer} on this machine, or separate hosts."
    if case.row.candidate.role != "candidate":
        return f"{lost}: other programs or threads used its core.", "stop other programs."
    text = f"{lost}: communication threads or other programs used its core."
    return text, "leave a core free for communication (fewer --ranks or --threads), and stop other programs."


def _on_idle_link(limit: Bottleneck) -> str:
    """Return the end of a sentence: the time the link alone would take, as the doctor measured it without compute."""
    latency_s, bandwidth_s = limit.facts["latency_s"], limit.facts["bandwidth_s"]
    if latency_s is None or bandwidth_s is None:
        return "."
    needed = f"{seconds(latency_s)} for latency and {seconds(bandwidth_s)} for the bytes"
    if _exceeds_link_time(limit):
        return f". The idle link needs only {needed}; probably the cores are busy."
    return f"; the idle link needs {needed}."


def _exceeds_link_time(limit: Bottleneck) -> bool:
    """Return whether transfers take much longer than the link alone explains."""
    latency_s, bandwidth_s = limit.facts["latency_s"], limit.facts["bandwidth_s"]
    known = latency_s is not None and bandwidth_s is not None
    return known and limit.seconds > MUCH_LONGER * (latency_s + bandwidth_s)


def _transfer(limit: Bottleneck) -> str:
    return "exposed transfer" if limit.facts["waits_known"] else "exposed transfer, or waiting for other ranks"


CORES_FOR_COMMUNICATION = "free cores for the communication threads: fewer --ranks or --threads on a host"


def _data(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    return (
        f"{_amount(limit, case)} is loading the batch.",
        "cheaper augmentation, or data that is already in memory.",
    )


POWER_OF_TWO = "a power of two as the number of ranks, or a ring (allreduce, ddp), which suits any number of ranks"


def _folding(case: ExplainedCandidate) -> str:
    last = "the last rank sends its gradients to a partner, which then has twice the work"
    if case.folded > 1:
        last = f"the last {case.folded} ranks send theirs to partners, which then have twice the work"
    return f"{case.topology.workers} ranks are not a power of two, so {last}"


def _slow_rank(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    rank, blame = limit.facts["rank"], percent(limit.facts["wait_share"], 0)
    text = f"{_amount(limit, case)} is waiting for other ranks, {blame} of it for rank {rank}"
    if rank < case.folded:
        partner = "that partner" if case.folded == 1 else "one of them"
        return f"{text}. {_folding(case)}; rank {rank} is {partner}.", f"{POWER_OF_TWO}."
    if rank == case.central_rank:
        return f"{text}, through which all gradients pass.", "a strategy without a central rank: allreduce or ddp."
    factor = parse_slow_ranks(case.config.get("slow_rank") or "").get(rank, 1.0)
    if factor > 1:
        remedy = (
            "a strategy in which ranks do not wait for each other (parameter_server:asynchronous=true); its gradients "
            "are stale, which may cost accuracy."
        )
        return f"{text}, which was slowed down {short_factor(factor)} on purpose (--slow-rank).", remedy
    return f"{text}.", f"find out what takes longer on rank {rank} than on the others: see the table of ranks."


def _uneven_ranks(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    text = f"{_amount(limit, case)} is waiting: ranks wait for each other in turn; no single straggler."
    return text, "steps of equal length: equal shares of the batch, and cores that no other program uses."


def _latency(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    facts = limit.facts
    each = f"{plural(round(facts['operations']), 'operation')} of {size(facts['bytes_each'])} on average"
    if _exceeds_link_time(limit):
        text = f"{_amount(limit, case)} is {_transfer(limit)}: {each}{_on_idle_link(limit)}"
        return text, ", or ".join([CORES_FOR_COMMUNICATION, *_through_memory(limit)]) + "."
    what = f"{_transfer(limit)}, limited by latency rather than bandwidth"
    text = f"{_amount(limit, case)} is {what}: {each}{_on_idle_link(limit)}"
    if case.sends == "singly":
        return text, "fewer, larger messages: ddp packs gradients into buckets."
    ways = ["larger buckets", "fewer ranks"] if case.overlaps else ["fewer ranks"]
    return text, ", or ".join([*ways, *_through_memory(limit)]) + "."


def _bandwidth(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    busiest = f"{size(limit.facts['bytes'])} that the busiest rank sends per step"
    text = f"{_amount(limit, case)} is {_transfer(limit)} of the {busiest}{_on_idle_link(limit)}"
    ways = ["spreading the traffic over all links (allreduce)"] if case.central_rank is not None else []
    if case.folded:
        text, ways = f"{text} {_folding(case)}.", [POWER_OF_TWO]
    if not case.overlaps:
        ways.append("overlapping it with the backward pass (ddp)")
    elif case.sends == "overlapped" and not limit.facts["within_host"]:
        ways.append("overlapping it with the forward pass too (priority)")
    ways += _through_memory(limit)
    if _exceeds_link_time(limit):
        ways.append(CORES_FOR_COMMUNICATION)
    elif not limit.facts["within_host"]:
        ways.append("a faster link")
    ways.append("sending less often: --accumulate or a larger --batch")
    return text, "; or ".join(ways) + "."


def _through_memory(limit: Bottleneck) -> list[str]:
    """Return the remedy that exists where all ranks are known to be on one host."""
    return ["shared memory instead of sockets (shared_memory)"] if limit.facts["within_host"] else []


def _memory(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    summing = f"summing {size(limit.facts['bytes'])} of gradients in shared memory"
    text = f"{_amount(limit, case)} is {summing} while nothing is computed."
    return text, "a core for each rank; or summing less often: --accumulate or a larger --batch."


def _exchange(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    text = f"{_amount(limit, case)} is exposed communication: transfers, and waiting for a server."
    ways = [f"more servers ({case.name}:servers=2)"] if "servers" in option_names(case.name) else []
    return text, "; or ".join([*ways, "a faster link", "sending less often: a larger --batch"]) + "."


def _other(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    what = "neither computing nor communication: the strategy's own arithmetic and copies, and Python overhead"
    return f"{_amount(limit, case)} is {what}.", "larger batches, which make this share smaller."


SENTENCES: dict[BottleneckKind, Callable[[Bottleneck, ExplainedCandidate], tuple[str, str]]] = {
    "compute": _compute,
    "cores": _cores,
    "data": _data,
    "straggler": _slow_rank,
    "uneven_ranks": _uneven_ranks,
    "latency": _latency,
    "bandwidth": _bandwidth,
    "memory": _memory,
    "exchange": _exchange,
    "other": _other,
}

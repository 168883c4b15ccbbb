"""Why a candidate takes the time it takes: what limits it, how much of the step that is, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.analysis.bottlenecks import Bottleneck, BottleneckKind, bottlenecks
from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.ranks import hub_rank
from paceline.config.slow_ranks import parse_slow_ranks
from paceline.plans.halving_doubling import folded
from paceline.records import RunRecord
from paceline.records.examination import PairLink
from paceline.report.formatting import percent, plural, seconds, size

MOST_REASONS = 3
MUCH_LONGER = 3.0
"""From how many times the idle link's time on transfers are said to be held up by something else."""

PART = {
    "compute": "compute",
    "cores": "descheduled",
    "data": "data",
    "straggler": "wait_s",
    "uneven_ranks": "wait_s",
    "latency": "exposed",
    "bandwidth": "exposed",
    "memory": "exposed",
    "exchange": "exposed",
    "other": "other",
}
"""The column of the time split that a limit rests on."""


@dataclass(frozen=True)
class Reason:
    """One thing that a candidate's time goes to."""

    candidate: str
    kind: BottleneckKind
    share: float
    text: str
    """What it is, with its numbers."""
    remedy: str
    """What would help; empty where that was said before."""
    anchor: str
    """The id of the number that it rests on: see `anchor`."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "candidate": self.candidate,
            "limit": self.kind,
            "share": self.share,
            "text": self.text,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class ExplainedCandidate:
    """What the sentences about one candidate may speak of."""

    row: CandidateRow
    topology: Mapping[str, Any]
    config: Mapping[str, Any]
    link: PairLink | None

    middle: int | None = None
    """The rank that everything goes to or comes from, if there is one."""

    @property
    def lockstep(self) -> bool:
        """Whether ranks step together."""
        return bool(self.topology.get("lockstep", True))

    @property
    def folded(self) -> int:
        """How many ranks, the last ones, only hand their gradients to a partner, which so has twice as much to do."""
        return folded(int(self.topology.get("workers") or 1)) if self.name == "halving_doubling" else 0

    @property
    def name(self) -> str:
        """Of the strategy, without its options."""
        return self.row.candidate.strategy.partition(":")[0]

    @property
    def travel(self) -> str:
        """How its gradients travel: `singly`, `packed` into few messages, or `overlapped` with backward."""
        return str(self.topology.get("travel") or ("overlapped" if self.name == "ddp" else "singly"))


def anchor(comparison: Comparison, candidate: str, part: str) -> str:
    """The id of a candidate's number in the table of time splits."""
    names = [row.candidate.name for row in comparison.rows]
    return f"split-{names.index(candidate)}-{part}"


def explain(comparison: Comparison) -> list[Reason]:
    """The reasons of every candidate that was measured with its events, in the order of the table, largest first."""
    found = list[Reason]()
    for row in comparison.rows:
        if row.split is None or not row.is_measured:
            continue
        run = comparison.record_set.recorded_runs_of(row.candidate.name)[0].run
        case = ExplainedCandidate(row, run.topology, run.config, _link(comparison), _middle(run))
        parts = bottlenecks(row.split, comparison.wires.get(row.candidate.name), case.topology, case.link)
        for limit in [limit for limit in parts if limit.kind != "compute" or limit is parts[0]][:MOST_REASONS]:
            text, remedy = SENTENCES[limit.kind](limit, case)
            if limit.kind == "compute" and any(reason.kind == "compute" for reason in found):
                remedy = ""  # It is the same for all.
            place = anchor(comparison, row.candidate.name, PART[limit.kind])
            found.append(Reason(row.candidate.name, limit.kind, limit.share, text, remedy, place))
    return found


def _middle(run: RunRecord) -> int | None:
    """By the plan, where there is one."""
    traffic = (run.summary or {}).get("traffic") or {}
    return hub_rank(traffic["sent_bytes"], traffic["received_bytes"]) if traffic else None


def _link(comparison: Comparison) -> PairLink | None:
    examination = comparison.examination
    return examination.link.slowest if examination is not None and examination.link is not None else None


def _amount(limit: Bottleneck, case: ExplainedCandidate) -> str:
    """Where ranks do not step together there is no such thing as *the* step."""
    step = "the step" if case.lockstep else "a rank's own step"
    return f"{percent(limit.share, 0)} of {step} ({seconds(limit.seconds)})"


def _compute(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    hidden_s = limit.facts["overlapped_s"]
    beside = f", {seconds(hidden_s)} of it while gradients travel" if hidden_s > 0.01 * limit.seconds else ""
    text = f"{_amount(limit, case)} is computing{beside}."
    plain = case.config.get("precision") == "fp32" and not case.config.get("channels_last")
    cheaper = "--precision bf16 --channels-last, where the processor is quick at it; " if plain else ""
    return text, f"{cheaper}faster or more processors. No strategy can gain here."


def _cores(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    facts = limit.facts
    if facts["cores"] is not None and facts["cores"] < 1 and facts["ranks"] == 1:
        return (
            f"{_amount(limit, case)} the computing thread does not run: its host has {facts['cores']:g} cores.",
            "more cores.",
        )
    if facts["threads_per_core"] is not None and facts["threads_per_core"] > 1:
        sharing = f"{plural(facts['ranks'], 'rank')} × {plural(facts['threads'], 'thread')} on {facts['cores']:g} cores"
        text = f"{_amount(limit, case)} the computing thread does not run: {sharing} are too many, unless it sleeps."
        fewer = max(1, int(facts["cores"] // facts["threads"]))
        return text, f"--ranks {fewer} on this machine, or hosts of their own."
    if case.row.candidate.role != "candidate":
        text = (
            f"{_amount(limit, case)} the computing thread does not run: whatever else does has its core, or it sleeps."
        )
        return text, "end other programs."
    text = (
        f"{_amount(limit, case)} the computing thread does not run: the threads that move gradients or other programs "
        "have its core, or it sleeps."
    )
    return text, "leave a core to communication (fewer --ranks or --threads), and end other programs."


def _on_idle_link(limit: Bottleneck) -> str:
    """What the link alone would take, as the doctor measured it while nothing was computed."""
    latency_s, bandwidth_s = limit.facts["latency_s"], limit.facts["bandwidth_s"]
    if latency_s is None or bandwidth_s is None:
        return ""
    idle = f"; the idle link needs {seconds(latency_s)} for their latency and {seconds(bandwidth_s)} for their bytes"
    return f"{idle}: it is held up by something else, as busy cores" if _is_held_up(limit) else idle


def _is_held_up(limit: Bottleneck) -> bool:
    """Whether transfers take much longer than the link alone explains."""
    latency_s, bandwidth_s = limit.facts["latency_s"], limit.facts["bandwidth_s"]
    known = latency_s is not None and bandwidth_s is not None
    return known and limit.seconds > MUCH_LONGER * (latency_s + bandwidth_s)


def _transfer(limit: Bottleneck) -> str:
    return "exposed transfer" if limit.facts["waits_known"] else "exposed transfer, or waiting for others"


CORES_FOR_THE_WIRE = "cores for the threads that move gradients: fewer --ranks or --threads on a host"


def _data(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    return (
        f"{_amount(limit, case)} goes into getting the batch.",
        "cheaper augmentation, or data that is ready in memory.",
    )


POWER_OF_TWO = "as many ranks as a power of two, or a ring (allreduce, ddp), which takes any number alike"


def _beyond(case: ExplainedCandidate) -> str:
    last = "the last rank folds into a partner"
    if case.folded > 1:
        last = f"the last {case.folded} ranks fold into partners"
    return f"{case.topology['workers']} ranks are no power of two, so {last}"


def _slow_rank(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    rank, blame = limit.facts["rank"], percent(limit.facts["wait_share"], 0)
    text = f"{_amount(limit, case)} ranks wait for others to come, {blame} of it for rank {rank}"
    if rank < case.folded:
        return f"{text}, which does the work of two: {_beyond(case)}.", f"{POWER_OF_TWO}."
    if rank == case.middle:
        return f"{text}, through which all gradients pass.", "no rank in the middle: allreduce, or ddp."
    factor = parse_slow_ranks(case.config.get("slow_rank") or "").get(rank, 1.0)
    if factor > 1:
        return f"{text}, which was made {factor:g}× as slow.", "a strategy in which nobody waits for the slowest rank."
    return f"{text}.", f"find out what rank {rank} does longer than the others: the table of ranks tells."


def _uneven_ranks(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    text = f"{_amount(limit, case)} ranks wait for others to come, now for this one, now for that one."
    return text, "steps of even length: equal shares, cores that nobody else uses."


def _latency(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    facts = limit.facts
    each = f"{plural(round(facts['operations']), 'operation')} of {size(facts['bytes_each'])} on average"
    what = f"{_transfer(limit)}, and latency rather than bandwidth"
    text = f"{_amount(limit, case)} is {what}: {each}{_on_idle_link(limit)}."
    if case.travel == "singly":
        return text, "fewer, larger messages: ddp packs them into buckets."
    ways = ["larger buckets", "fewer ranks"] if case.travel == "overlapped" else ["fewer ranks"]
    ways = [CORES_FOR_THE_WIRE] if _is_held_up(limit) else ways
    return text, ", or ".join([*ways, *_through_memory(limit)]) + "."


def _bandwidth(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    busiest = f"{size(limit.facts['bytes'])} that the busiest rank sends"
    text = f"{_amount(limit, case)} is {_transfer(limit)} of the {busiest}{_on_idle_link(limit)}."
    ways = ["spreading it over all links (allreduce)"] if case.middle is not None else []
    if case.folded:
        text, ways = f"{text[:-1]}; {_beyond(case)}.", [POWER_OF_TWO]
    if case.travel != "overlapped":
        ways.append("hiding it behind backward (ddp)")
    elif case.name != "priority" and not limit.facts["within_host"]:
        ways.append("hiding it behind forward too (priority)")
    ways += _through_memory(limit)
    if _is_held_up(limit):
        ways.append(CORES_FOR_THE_WIRE)
    elif not limit.facts["within_host"]:
        ways.append("a faster link")
    ways.append("sending less often: --accumulate, a larger --batch")
    return text, "; or ".join(ways) + "."


def _through_memory(limit: Bottleneck) -> list[str]:
    """What helps where all ranks are on one host, as far as that is known."""
    return ["memory that ranks share, in place of sockets (shared_memory)"] if limit.facts["within_host"] else []


def _memory(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    added = f"add up {size(limit.facts['bytes'])} of gradients in memory that they share"
    text = f"{_amount(limit, case)} ranks {added}, and have nothing else to do."
    return text, "a core for each rank; or doing it less often: --accumulate, a larger --batch."


def _exchange(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    text = f"{_amount(limit, case)} is exposed communication: transfers, and waiting for whoever is busy with others."
    ways = ["more of them (parameter_server:servers=2)"] if case.name == "parameter_server" else []
    return text, "; or ".join([*ways, "a faster link", "sending less often: a larger --batch"]) + "."


def _other(limit: Bottleneck, case: ExplainedCandidate) -> tuple[str, str]:
    what = "neither computing nor communication: the strategy's own arithmetic and copies, Python"
    return f"{_amount(limit, case)} is {what}.", "larger batches, so that it weighs less."


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

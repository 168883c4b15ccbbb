"""Rows of the tables on the steps: time split, bytes sent and operations."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.split import PARTS
from paceline.analysis.traffic.wire import Traffic, Wire
from paceline.formatting import size
from paceline.records.summary import Split
from paceline.records.timeline import RowKind

SPLIT_PARTS = (*PARTS, "data", "descheduled")
PURPOSES = ("gradients", "buffers", "statistics", "weights", "control")


@dataclass(frozen=True)
class SplitRow:
    """Time split of a candidate, or of one of its ranks; seconds per step."""

    candidate: str
    rank: int | None
    """None for the mean over all ranks."""
    split: Split
    wait_s: float | None
    """Waiting for other ranks to arrive at isolated operations."""
    waited_for: float | None
    """Share of all such waiting that was for this rank."""


@dataclass(frozen=True)
class BytesRow:
    """Bytes that the busiest rank of a candidate sends in a step, by content."""

    candidate: str
    gradients: int | None
    buffers: int | None
    statistics: int | None
    weights: int | None
    control: int | None
    """Small values for the training loop, such as whether every rank has another batch."""
    total: int
    lower_bound: int | None
    """Least that the busiest rank must send to all-reduce the gradients."""
    over_bound: float | None
    """Gradients sent, and weights where a strategy returns weights instead of gradients, ÷ `lower_bound`."""


@dataclass(frozen=True)
class OperationRow:
    """Operations of one kind and content, in a candidate's run of median speed."""

    candidate: str
    traffic: Traffic
    utilisation: float | None
    """busbw ÷ the point-to-point bandwidth that the doctor measured."""


def split_rows(comparison: Comparison) -> list[SplitRow]:
    """Return one row per candidate that recorded events, best first."""
    return [
        _split_row(row.candidate.name, None, row.split.mean, comparison.wires.get(row.candidate.name))
        for row in comparison.rows
        if row.split is not None
    ]


def rank_split_rows(comparison: Comparison) -> list[SplitRow]:
    """Return one row per rank of every candidate that recorded events."""
    return [
        _split_row(row.candidate.name, rank, own, comparison.wires.get(row.candidate.name))
        for row in comparison.rows
        if row.split is not None
        for rank, own in row.split.ranks.items()
    ]


def _split_row(candidate: str, rank: int | None, split: Split, wire: Wire | None) -> SplitRow:
    wait_s = waited_for = None
    if wire is not None and wire.traffic:
        known = rank is not None and rank < wire.ranks
        wait_s = wire.wait_s if rank is None else wire.waits_s[rank] if known else None
        waited_for = wire.waited_for.get(rank, 0.0) if known and rank is not None and wire.waited_for else None
    return SplitRow(candidate, rank, split, wait_s, waited_for)


def bytes_rows(comparison: Comparison) -> list[BytesRow]:
    """Return one row per candidate that sends anything."""
    found = []
    for name, wire in comparison.wires.items():
        busiest = {purpose: max(sizes) for purpose, sizes in wire.sent_bytes.items()}
        if not any(busiest.values()):
            continue
        bound = wire.lower_bound_bytes
        together = [sum(sizes) for sizes in zip(*wire.sent_bytes.values(), strict=True)]
        needed = [sizes for purpose, sizes in wire.sent_bytes.items() if purpose in ("gradients", "weights")]
        most = max((sum(sizes) for sizes in zip(*needed, strict=True)), default=0)
        over = most / bound if bound and most else None
        by_purpose = {purpose: busiest.get(purpose) for purpose in PURPOSES}
        found.append(BytesRow(name, **by_purpose, total=max(together), lower_bound=bound, over_bound=over))
    return found


def shared_memory_sentences(comparison: Comparison) -> list[str]:
    """Return sentences on the bytes that ranks exchange through shared memory."""
    found = []
    for name, wire in comparison.wires.items():
        shared = sum(traffic.bytes_per_step for traffic in wire.traffic if traffic.kind == RowKind.SHARED_REDUCE.title)
        if shared:
            found.append(f"{name}: the ranks of a host sum {size(shared)} per step in shared memory.")
    return found


def operation_rows(comparison: Comparison) -> list[OperationRow]:
    """Return one row per candidate, kind of operation and content."""
    examination = comparison.examination
    link = examination.link if examination is not None else None
    bandwidth = link.bytes_per_s if link is not None else None
    return [
        _operation_row(name, traffic, bandwidth) for name, wire in comparison.wires.items() for traffic in wire.traffic
    ]


def _operation_row(candidate: str, traffic: Traffic, bandwidth: float | None) -> OperationRow:
    used = traffic.busbw / bandwidth if bandwidth and traffic.busbw is not None else None
    return OperationRow(candidate, traffic, used)

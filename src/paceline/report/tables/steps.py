"""Tables about the steps: time split, bytes sent and operations; rows for CSV, columns for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.split import PARTS
from paceline.analysis.traffic.wire import Traffic, Wire
from paceline.records.summary import Split
from paceline.records.timeline import RowKind
from paceline.report.definitions import DEFINITIONS
from paceline.report.formatting import percent, size
from paceline.report.tables.columns import (
    NOTHING,
    SIZES,
    TIMES,
    PageCell,
    PageColumn,
    Unit,
    percent_unit,
    plain_column,
    unit_for,
)

RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
SPLIT_PARTS = (*PARTS, "data", "descheduled")
PURPOSES = ("gradients", "buffers", "statistics", "weights", "control")


@dataclass(frozen=True)
class SplitRow:
    """Time split of a candidate, or of one of its ranks; seconds per step."""

    candidate: str
    rank: int | None
    """None for the mean over all ranks."""
    step_s: float
    compute_s: float
    overlapped_s: float
    exposed_s: float
    other_s: float
    data_s: float
    descheduled_s: float | None
    overlap: float | None
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
    kind: str
    purpose: str
    per_step: float
    bytes_each: float
    duration_s: float
    isolated: float
    transfer_s: float | None
    wait_s: float | None
    algbw: float | None
    busbw: float | None
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
    parts = {f"{part}_s": getattr(split, f"{part}_s") for part in SPLIT_PARTS}
    return SplitRow(candidate, rank, split.step_s, **parts, overlap=split.overlap, wait_s=wait_s, waited_for=waited_for)


def split_columns(rows: Sequence[SplitRow]) -> list[PageColumn]:
    """Return the columns of the time split: times in one unit, since they add up, with their shares in small print."""
    unit = unit_for([row.step_s for row in rows], TIMES)
    columns = [plain_column("step_s", "Mean step", rows, unit, definition="split_step_s")]
    for part in SPLIT_PARTS:
        cells = [_part_cell(getattr(row, f"{part}_s"), row.step_s, unit) for row in rows]
        columns.append(PageColumn(part, DEFINITIONS[f"split_{part}"].term, unit.name, f"split_{part}", cells))
    columns.append(plain_column("overlap", "Overlap", rows, percent_unit(0)))
    columns.append(plain_column("wait_s", "Waiting for others", rows, unit, definition="wait"))
    columns.append(plain_column("waited_for", "Waited for by others", rows, percent_unit(0)))
    return [column for column in columns if not column.is_empty]


def _part_cell(value: float | None, step_s: float, unit: Unit) -> PageCell:
    if value is None:
        return PageCell(NOTHING)
    return PageCell(unit.write(value), value, interval=percent(value / step_s, 0) if step_s else "")


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


def bytes_columns(rows: Sequence[BytesRow]) -> list[PageColumn]:
    """Return the columns of bytes sent, in one unit; a kind that no candidate sends has no column."""
    unit = unit_for([row.total for row in rows], SIZES)
    columns = [plain_column(purpose, purpose.capitalize(), rows, unit, definition="sent_kinds") for purpose in PURPOSES]
    columns += [
        plain_column("total", "Total", rows, unit, definition="sent_kinds"),
        plain_column("lower_bound", "Minimum for gradients", rows, unit),
        plain_column("over_bound", "Sent ÷ minimum", rows, Unit(1, "", 2), definition="lower_bound"),
    ]
    return [column for column in columns if not column.is_empty]


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
    each = traffic.bytes_per_step / traffic.per_step if traffic.per_step else 0.0
    same = {
        name: getattr(traffic, name)
        for name in ("kind", "purpose", "per_step", "duration_s", "isolated", "transfer_s", "wait_s", "algbw", "busbw")
    }
    return OperationRow(candidate=candidate, bytes_each=each, utilisation=used, **same)


def operation_columns(rows: Sequence[OperationRow]) -> list[PageColumn]:
    """Return the columns of the table of operations, without the operation's name."""
    times = unit_for([row.duration_s for row in rows], TIMES)
    rates = unit_for([row.busbw for row in rows if row.busbw is not None], RATES)
    rates = rates._replace(decimals=min(rates.decimals, 1))
    columns = [
        plain_column("per_step", "Per step", rows, Unit(1, "", 0), definition="operations"),
        plain_column("bytes_each", "Size", rows, SIZES, definition="operation_bytes"),
        plain_column("duration_s", "Time", rows, times, definition="operation_s"),
        plain_column("isolated", "Isolated", rows, percent_unit(0)),
        plain_column("transfer_s", "Transfer", rows, times, definition="transfer"),
        plain_column("wait_s", "Wait", rows, times, definition="wait"),
        plain_column("algbw", "algbw", rows, rates),
        plain_column("busbw", "busbw", rows, rates),
        plain_column("utilisation", "Utilisation", rows, percent_unit(0)),
    ]
    return [column for column in columns if not column.is_empty]

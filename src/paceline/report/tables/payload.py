"""Who sends how much to whom, as the kernel counted it: sentences, rows and columns, and a matrix for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.analysis.traffic.payload import PLAN, TOLERANCE, Payload, RankBytes
from paceline.report.formatting import percent, plural, size
from paceline.report.tables.columns import NOTHING, SIZES, PageCell, PageColumn, Unit, plain_column, unit_for

ALIKE = 0.02
"""Ranks whose bytes differ by less are told of together."""
NEXT_TO_NOTHING = 1e-4
"""Buckets may be cut at other places than planned, which moves a few bytes from one rank to another."""
MOST_RANKS = 16
"""A larger matrix is not drawn; the table of ranks has them all."""


@dataclass(frozen=True)
class RankBytesRow:
    """What a rank of a candidate sends and receives in a step, by the kernel's count, and what it should."""

    candidate: str
    rank: int
    sent_bytes: float
    planned_sent_bytes: float | None
    framing_bytes: float | None
    over_plan: float | None
    """Counted ÷ planned with framing."""
    received_bytes: float
    retransmitted_bytes: float | None
    """None where nothing had to be sent again."""
    interface: str | None
    """On the first rank of a host: what its ranks send through."""
    interface_sent_bytes: float | None
    interface_received_bytes: float | None


@dataclass(frozen=True)
class Matrix:
    """Who sends how much to whom, for one candidate."""

    candidate: str
    sentence: str
    holds: bool | None
    unit: str
    cells: list[list[PageCell]]
    """A row per sender; `share` is of the busiest pair of all candidates. Empty where there are too many ranks."""


def payload_sentence(payload: Payload) -> str:
    """What the ranks send in a step, and how far that is from what was planned."""
    return f"{_who_sends(payload.ranks)}{_proven(payload)}"


def _who_sends(ranks: Sequence[RankBytes]) -> str:
    if not any(rank.sent_bytes for rank in ranks):
        return "nothing is sent"
    if _alike(ranks):
        return f"every rank {_both(ranks[0])} per step"
    for odd in ranks:
        others = [rank for rank in ranks if rank is not odd]
        if _alike(others):
            them = f"each of the others {_both(others[0])}" if len(others) > 1 else f"the other one {_both(others[0])}"
            return f"rank {odd.rank} {_both(odd)} per step, {them}"
    least, most = (pick(ranks, key=lambda rank: rank.sent_bytes) for pick in (min, max))
    return (
        f"ranks send from {size(least.sent_bytes)} (rank {least.rank}) to {size(most.sent_bytes)} (rank {most.rank}) "
        "per step"
    )


def _both(rank: RankBytes) -> str:
    sent, received = size(rank.sent_bytes), size(rank.received_bytes)
    return f"sends and receives {sent}" if sent == received else f"sends {sent} and receives {received}"


def _alike(ranks: Sequence[RankBytes]) -> bool:
    for sizes in ([rank.sent_bytes for rank in ranks], [rank.received_bytes for rank in ranks]):
        if max(sizes) - min(sizes) > ALIKE * max(sizes):
            return False
    return True


def _proven(payload: Payload) -> str:
    counted = f"measured at the sockets over {plural(payload.steps, 'step')}"
    off = payload.deviation
    if off is None:
        return f": {counted}"
    against = (
        f"{payload.expected_from} and its framing"
        if payload.expected_from == PLAN
        else f"{payload.expected_from} and framing"
    )
    if off == 0:
        return f": {counted}, exactly {against}"
    if off < NEXT_TO_NOTHING:
        return f": {counted}, within {percent(NEXT_TO_NOTHING, 2)} of {against}"
    apart = f"{percent(off, 2)} from {against}" if off < 10 else f"far from {against}"
    return f": {counted}, {apart}" + ("" if payload.holds else f", more than the {percent(TOLERANCE, 0)} allowed")


def matrices(payloads: Mapping[str, Payload]) -> list[Matrix]:
    """One per candidate that sends anything, all in one unit and one scale."""
    sending = {name: payload for name, payload in payloads.items() if any(pair.bytes for pair in payload.pairs)}
    sizes = [pair.bytes for payload in sending.values() for pair in payload.pairs]
    unit, most = unit_for([value for value in sizes if value > ALIKE * max(sizes)], SIZES), max(sizes, default=0.0)
    unit = unit._replace(decimals=min(unit.decimals, 2))
    return [
        Matrix(
            candidate=name,
            sentence=_capital(payload_sentence(payload)),
            holds=payload.holds,
            unit=unit.name,
            cells=_cells(payload, unit, most) if len(payload.ranks) <= MOST_RANKS else [],
        )
        for name, payload in sending.items()
    ]


def _cells(payload: Payload, unit: Unit, most: float) -> list[list[PageCell]]:
    return [
        [
            PageCell("" if source == target else _written(value, unit), value, share=value / most)
            for target, value in enumerate(row)
        ]
        for source, row in enumerate(payload.matrix)
    ]


def _written(value: float, unit: Unit) -> str:
    """A figure without its unit; one too small for its digits keeps its own, since it is not nothing."""
    if value == 0:
        return NOTHING
    return size(value) if 0 < value < 0.5 * unit.scale * 10**-unit.decimals else unit.write(value)


def rank_bytes_rows(payloads: Mapping[str, Payload]) -> list[RankBytesRow]:
    """One per rank of each candidate that was counted and sends anything."""
    return [
        _row(name, payload, rank)
        for name, payload in payloads.items()
        if any(pair.bytes for pair in payload.pairs)
        for rank in payload.ranks
    ]


def payload_rows(payloads: Mapping[str, Payload]) -> list[dict[str, Any]]:
    """One per pair of ranks of each candidate, with plain numbers."""
    return [
        {"candidate": name, **asdict(pair), "deviation": pair.deviation}
        for name, payload in payloads.items()
        for pair in payload.pairs
    ]


def payload_context(payloads: Mapping[str, Payload]) -> dict[str, Any]:
    """What the template of this section needs."""
    rows = rank_bytes_rows(payloads)
    return {
        "matrices": matrices(payloads),
        "rank_bytes_rows": rows,
        "rank_bytes_columns": rank_bytes_columns(rows),
    }


def _row(candidate: str, payload: Payload, rank: RankBytes) -> RankBytesRow:
    host = next((host for host in payload.hosts if host.ranks[:1] == [rank.rank]), None)
    expected = None if rank.planned_sent_bytes is None else rank.planned_sent_bytes + (rank.framing_bytes or 0)
    return RankBytesRow(
        candidate=candidate,
        rank=rank.rank,
        sent_bytes=rank.sent_bytes,
        planned_sent_bytes=rank.planned_sent_bytes,
        framing_bytes=rank.framing_bytes,
        over_plan=rank.sent_bytes / expected if expected else None,
        received_bytes=rank.received_bytes,
        retransmitted_bytes=rank.retransmitted_bytes or None,
        interface=None if host is None else host.interface,
        interface_sent_bytes=None if host is None else host.sent_bytes,
        interface_received_bytes=None if host is None else host.received_bytes,
    )


def rank_bytes_columns(rows: Sequence[RankBytesRow]) -> list[PageColumn]:
    """Every figure of such a row."""
    unit = unit_for([row.sent_bytes for row in rows], SIZES)
    columns = [
        plain_column("sent_bytes", "Sent", rows, unit, definition="socket_bytes"),
        plain_column("planned_sent_bytes", "Tensors by the plan", rows, unit, definition="socket_plan"),
        plain_column("framing_bytes", "Framing", rows, SIZES, definition="framing_bytes"),
        plain_column("over_plan", "Sent ÷ expected", rows, Unit(1, "", 4), definition="socket_proof"),
        plain_column("received_bytes", "Received", rows, unit, definition="socket_bytes"),
        plain_column("retransmitted_bytes", "Sent again", rows, SIZES),
        plain_column("interface_sent_bytes", "Interface sent", rows, unit, definition="interface_bytes"),
        plain_column("interface_received_bytes", "Interface received", rows, unit, definition="interface_bytes"),
    ]
    return [column for column in columns if not column.is_empty]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

"""Bytes sent between ranks, as the kernel counted them: sentences, rows, and a matrix for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.analysis.traffic.payload import TOLERANCE, HostBytes, Payload, RankBytes
from paceline.formatting import DECIMALS, NOTHING, SIZES, Unit, percent, plural, size, unit_for
from paceline.report.figures.columns import Cell

SIMILAR = 0.02
"""Relative difference of bytes up to which ranks share a clause in the sentence."""
NEGLIGIBLE = 1e-4
"""Deviation from the plan that is not reported exactly: bucket boundaries may differ from the planned ones, which
moves a few bytes from one rank to another."""
MOST_RANKS = 16
"""Most ranks for which the matrix is drawn; the table of ranks has all of them."""


@dataclass(frozen=True)
class RankBytesRow:
    """Bytes that a rank sends and receives per step, as counted by the kernel and as planned."""

    candidate: str
    counted: RankBytes
    interface: HostBytes | None
    """Network interface that the ranks of a host send through; set on the host's first rank only."""


@dataclass(frozen=True)
class Matrix:
    """Bytes per step between each pair of ranks, for one candidate."""

    candidate: str
    sentence: str
    holds: bool | None
    unit: str
    cells: list[list[Cell]]
    """One row per sender; `share` is relative to the busiest pair of all candidates. Empty for too many ranks."""


def payload_sentence(payload: Payload) -> str:
    """Return the bytes that ranks send per step and their deviation from the plan; without a full stop."""
    return f"{_bytes_per_rank(payload.ranks)}{_deviation(payload)}"


def _bytes_per_rank(ranks: Sequence[RankBytes]) -> str:
    if not any(rank.sent_bytes for rank in ranks):
        return "nothing is sent"
    if _similar(ranks):
        return f"every rank {_sends_and_receives(ranks[0])} per step"
    for odd in ranks:
        others = [rank for rank in ranks if rank is not odd]
        if _similar(others):
            them = "each of the others" if len(others) > 1 else f"rank {others[0].rank}"
            return f"rank {odd.rank} {_sends_and_receives(odd)} per step, {them} {_sends_and_receives(others[0])}"
    least, most = (pick(ranks, key=lambda rank: rank.sent_bytes) for pick in (min, max))
    return (
        f"ranks send from {size(least.sent_bytes)} (rank {least.rank}) to {size(most.sent_bytes)} (rank {most.rank}) "
        "per step"
    )


def _sends_and_receives(rank: RankBytes) -> str:
    sent, received = size(rank.sent_bytes), size(rank.received_bytes)
    return f"sends and receives {sent}" if sent == received else f"sends {sent} and receives {received}"


def _similar(ranks: Sequence[RankBytes]) -> bool:
    for sizes in ([rank.sent_bytes for rank in ranks], [rank.received_bytes for rank in ranks]):
        if max(sizes) - min(sizes) > SIMILAR * max(sizes):
            return False
    return True


def _deviation(payload: Payload) -> str:
    counted = f"measured at the sockets over {plural(payload.steps, 'step')}"
    off = payload.deviation
    if off is None:
        return f": {counted}"
    against = f"{payload.expected_from} plus framing"
    if off == 0:
        return f": {counted}, exactly {against}"
    if off < NEGLIGIBLE:
        return f": {counted}, within {percent(NEGLIGIBLE, 2)} of {against}"
    difference = f"{percent(off, 2)} off {against}" if off < 10 else f"far off {against}"
    return f": {counted}, {difference}" + ("" if payload.holds else f", more than the {percent(TOLERANCE, 0)} allowed")


def matrices(payloads: Mapping[str, Payload]) -> list[Matrix]:
    """Return one matrix per candidate that sends anything, all in one unit and on one scale."""
    sending = {name: payload for name, payload in payloads.items() if any(pair.bytes for pair in payload.pairs)}
    sizes = [pair.bytes for payload in sending.values() for pair in payload.pairs]
    unit, most = unit_for([value for value in sizes if value > SIMILAR * max(sizes)], SIZES), max(sizes, default=0.0)
    unit = replace(unit, decimals=min(unit.decimals, DECIMALS))
    return [
        Matrix(
            candidate=name,
            sentence=_capitalised(payload_sentence(payload)),
            holds=payload.holds,
            unit=unit.name,
            cells=_cells(payload, unit, most) if len(payload.ranks) <= MOST_RANKS else [],
        )
        for name, payload in sending.items()
    ]


def _cells(payload: Payload, unit: Unit, most: float) -> list[list[Cell]]:
    return [
        [
            Cell("" if source == target else _format_bytes(value, unit), value, share=value / most)
            for target, value in enumerate(row)
        ]
        for source, row in enumerate(payload.matrix)
    ]


def _format_bytes(value: float, unit: Unit) -> str:
    """Format bytes without the unit; a value that would round to zero gets its own unit."""
    if value == 0:
        return NOTHING
    return size(value) if 0 < value < 0.5 * unit.scale * 10**-unit.decimals else unit.write(value)


def rank_bytes_rows(payloads: Mapping[str, Payload]) -> list[RankBytesRow]:
    """Return one row per rank of each candidate that was counted and sends anything."""
    return [
        row
        for name, payload in payloads.items()
        if any(pair.bytes for pair in payload.pairs)
        for row in rank_bytes_rows_of(name, payload)
    ]


def rank_bytes_rows_of(candidate: str, payload: Payload) -> list[RankBytesRow]:
    """Return one row per rank of a candidate."""
    return [_row(candidate, payload, rank) for rank in payload.ranks]


def payload_rows(payloads: Mapping[str, Payload]) -> list[dict[str, Any]]:
    """Return one row per pair of ranks of each candidate, with plain numbers."""
    return [
        {"candidate": name, **asdict(pair), "deviation": pair.deviation}
        for name, payload in payloads.items()
        for pair in payload.pairs
    ]


def _row(candidate: str, payload: Payload, rank: RankBytes) -> RankBytesRow:
    interface = next((host for host in payload.hosts if host.ranks[:1] == [rank.rank]), None)
    return RankBytesRow(candidate, rank, interface)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]

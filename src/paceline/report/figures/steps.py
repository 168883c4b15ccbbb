"""Figures of the tables on the steps: time split, bytes sent, operations, and bytes between ranks."""

from __future__ import annotations

from functools import partial

from paceline.analysis.steps.split import PARTS
from paceline.analysis.traffic.payload import RankBytes
from paceline.analysis.traffic.wire import Traffic
from paceline.formatting import FACTOR, RATES, RATIO, SHARE, SIZES, TIMES, WHOLE, percent
from paceline.records.summary import Split
from paceline.report.definitions import (
    INTERFACE_BYTES,
    LOWER_BOUND,
    SENT_KINDS,
    SOCKET_BYTES,
    SPLIT_TERMS,
    WAIT,
    Definition,
)
from paceline.report.figures.figure import Figure, InTerminal, figures_of_part
from paceline.report.tables.payload import RankBytesRow
from paceline.report.tables.steps import PURPOSES, SPLIT_PARTS, BytesRow, OperationRow, SplitRow


def _share(part: str, split: Split) -> float | None:
    return None if getattr(split, f"{part}_s") is None else split.share(part)


def _share_of_step(part: str, split: Split) -> str:
    share = _share(part, split)
    return "" if share is None else percent(share, 0)


def _terminal_heading(part: str) -> str:
    """Return the heading of a part, in brackets if it belongs to another part."""
    return part if part in PARTS else f"({part})"


def _split_figure(part: str) -> Figure[Split]:
    """Return the time of one part, with its share of the step in small print."""
    return Figure(
        key=f"{part}_s",
        heading=SPLIT_TERMS[part].term,
        format=TIMES,
        definition=SPLIT_TERMS[part],
        terminal=InTerminal(_terminal_heading(part), 10),
        unit_of="step_s",
        small_print=partial(_share_of_step, part),
    )


def _share_figure(part: str) -> Figure[Split]:
    """Return the share of one part for the terminal; the page has it as small print, and files have the times."""
    return Figure(
        key=f"{part}_share",
        heading=SPLIT_TERMS[part].term,
        format=SHARE,
        definition=SPLIT_TERMS[part],
        value=partial(_share, part),
        terminal=InTerminal(_terminal_heading(part), 10),
        page=False,
        csv=False,
        json=False,
    )


_OF_SPLIT: tuple[Figure[Split], ...] = (
    Figure(
        key="step_s",
        heading="Mean step",
        format=TIMES,
        definition=Definition(
            "split_step_s",
            "Mean step",
            "Mean length of a rank's own steps after five warm-up steps, over ranks and repeats. Where ranks do "
            "not step together, a rank with more steps counts more. The parts of the time split add up to it. "
            "The time per step in the first table differs: it is a median of windows, so a few slow steps do "
            "not change it, and it includes the time between steps.",
        ),
    ),
    *map(_split_figure, SPLIT_PARTS),
    Figure(
        key="overlap",
        heading="Overlap",
        format=SHARE,
        definition="Overlapped ÷ (overlapped + exposed): the share of communication time that is hidden behind "
        "computing. Undefined if nothing is sent, for example on a single rank.",
        terminal=InTerminal("overlap", 9),
    ),
)

SPLIT_FIGURES: tuple[Figure[SplitRow], ...] = (
    *figures_of_part("split", _OF_SPLIT),
    Figure(
        key="wait_s",
        heading="Waiting for others",
        format=TIMES,
        definition=WAIT,
        unit_of="split.step_s",
    ),
    Figure(
        key="waited_for",
        heading="Waited for by others",
        format=SHARE,
        definition=Definition(
            "waited_for",
            "Waited for",
            "Share of the other ranks' total waiting time that was for this rank. While a rank waits itself, "
            "the waiting counts for the rank that it waits for.",
        ),
    ),
)

SHARE_FIGURES: tuple[Figure[SplitRow], ...] = figures_of_part("split", map(_share_figure, SPLIT_PARTS))
"""Shares of the parts, in the columns of their times."""

BYTES_FIGURES: tuple[Figure[BytesRow], ...] = (
    *[
        Figure[BytesRow](
            key=purpose, heading=purpose.capitalize(), format=SIZES, definition=SENT_KINDS, unit_of="total"
        )
        for purpose in PURPOSES
    ],
    Figure(
        key="total",
        heading="Total",
        format=SIZES,
        definition=SENT_KINDS,
    ),
    Figure(
        key="lower_bound",
        heading="Minimum for gradients",
        format=SIZES,
        definition=LOWER_BOUND,
        unit_of="total",
    ),
    Figure(
        key="over_bound",
        heading="Sent ÷ minimum",
        format=FACTOR,
        definition=LOWER_BOUND,
    ),
)

_OF_TRAFFIC: tuple[Figure[Traffic], ...] = (
    Figure(
        key="per_step",
        heading="Per step",
        format=WHOLE,
        definition=Definition(
            "operations",
            "Operations",
            "Number of operations per step that a rank participates in.",
        ),
    ),
    Figure(
        key="bytes_each",
        heading="Size",
        format=SIZES,
        definition=Definition(
            "operation_bytes",
            "Size",
            "Bytes of the tensor (S); for gather, scatter, all_gather and reduce_scatter the total over all ranks.",
        ),
    ),
    Figure(
        key="duration_s",
        heading="Time",
        format=TIMES,
        definition=Definition(
            "operation_s",
            "Time of an operation",
            "Mean time from its start to its end on a rank, including waiting.",
        ),
    ),
    Figure(
        key="isolated",
        heading="Isolated",
        format=SHARE,
        definition="Share of operations during which none of their ranks had another operation in progress. An "
        "asynchronous operation starts when it is enqueued, not when its bytes are sent, so the "
        "duration of overlapping operations says nothing about the link.",
    ),
    Figure(
        key="transfer_s",
        heading="Transfer",
        format=TIMES,
        definition=Definition(
            "transfer",
            "Transfer",
            "Shortest duration of an operation over its ranks: that of the rank that arrived last and so did "
            "not wait. For operations with a root or between two ranks: the time from the arrival of the last "
            "rank that is needed. Reported for isolated operations only.",
        ),
        unit_of="duration_s",
    ),
    Figure(
        key="wait_s",
        heading="Wait",
        format=TIMES,
        definition=WAIT,
        unit_of="duration_s",
    ),
    Figure(
        key="algbw",
        heading="algbw",
        format=RATES,
        definition="Algorithm bandwidth: size ÷ transfer time.",
        unit_of="busbw",
    ),
    Figure(
        key="busbw",
        heading="busbw",
        format=RATES,
        definition="Bus bandwidth, which can be compared with the bandwidth of a link: algbw × 2(n−1)/n for "
        "all_reduce, × (n−1)/n for reduce_scatter, all_gather, gather and scatter, × 1 for broadcast, "
        "reduce and messages, on n ranks.",
    ),
)

OPERATION_FIGURES: tuple[Figure[OperationRow], ...] = (
    *figures_of_part("traffic", _OF_TRAFFIC),
    Figure(
        key="utilisation",
        heading="Utilisation",
        format=SHARE,
        definition="busbw ÷ the point-to-point bandwidth of the slowest link that the doctor measured.",
    ),
)

_OF_RANK_BYTES: tuple[Figure[RankBytes], ...] = (
    Figure(
        key="sent_bytes",
        heading="Sent",
        format=SIZES,
        definition=SOCKET_BYTES,
    ),
    Figure(
        key="planned_sent_bytes",
        heading="Planned tensor bytes",
        format=SIZES,
        definition=Definition(
            "socket_plan",
            "Planned tensor bytes",
            "Bytes of tensors by the strategy's plan; without a plan, by the operations that were recorded and "
            "the way Gloo carries them out.",
        ),
        unit_of="sent_bytes",
    ),
    Figure(
        key="framing_bytes",
        heading="Framing",
        format=SIZES,
        definition="Bytes that Gloo adds: 96 per message on the sending side, 48 on the receiving side. A "
        "collective consists of many messages, so for small tensors the framing is a large part.",
    ),
    Figure(
        key="over_plan",
        heading="Sent ÷ expected",
        format=RATIO,
        definition=Definition(
            "socket_proof",
            "Proof of bytes",
            "Bytes at the sockets ÷ (planned tensor bytes + framing). The proof holds if the ratio is within 1% "
            "of one for every pair of ranks.",
        ),
    ),
    Figure(
        key="received_bytes",
        heading="Received",
        format=SIZES,
        definition=SOCKET_BYTES,
        unit_of="sent_bytes",
    ),
    Figure(
        key="retransmitted_bytes",
        heading="Retransmitted",
        format=SIZES,
        definition="Payload that the kernel had to send again, for example after a packet loss.",
        usual=0,
    ),
)

RANK_BYTES_FIGURES: tuple[Figure[RankBytesRow], ...] = (
    *figures_of_part("counted", _OF_RANK_BYTES),
    Figure(
        key="interface_sent_bytes",
        heading="Interface sent",
        format=SIZES,
        definition=INTERFACE_BYTES,
        value=lambda row: None if row.interface is None else row.interface.sent_bytes,
        unit_of="counted.sent_bytes",
    ),
    Figure(
        key="interface_received_bytes",
        heading="Interface received",
        format=SIZES,
        definition=INTERFACE_BYTES,
        value=lambda row: None if row.interface is None else row.interface.received_bytes,
        unit_of="counted.sent_bytes",
    ),
)

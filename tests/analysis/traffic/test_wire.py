"""Transfers, waits and bandwidths of hand-made timelines."""

from __future__ import annotations

import pytest

from analysis.timelines import operation, phase, timeline
from paceline.analysis.traffic.wire import Traffic, Wire, bus_factor, wire_of
from paceline.plans.operations import sent_by_rank
from paceline.records.timeline import Purpose, RowKind, Timeline

MB = 1_000_000


def only(wire: Wire | None) -> Traffic:
    assert wire is not None
    (traffic,) = wire.traffic
    return traffic


def test_the_straggler_has_the_transfer_time_and_the_others_wait_for_it() -> None:
    wire = wire_of(
        {
            0: timeline(operation(RowKind.ALL_REDUCE, 0.0, 1.0, 4 * MB)),
            1: timeline(operation(RowKind.ALL_REDUCE, 0.8, 1.0, 4 * MB)),
            2: timeline(operation(RowKind.ALL_REDUCE, 0.3, 1.0, 4 * MB)),
            3: timeline(operation(RowKind.ALL_REDUCE, 0.7, 1.0, 4 * MB)),
        }
    )
    assert wire is not None
    assert only(wire).transfer_s == pytest.approx(0.2)
    assert wire.waits_s == pytest.approx([0.8, 0.0, 0.5, 0.1])
    assert wire.straggler == 1
    assert wire.waited_for == {1: 1.0}
    assert only(wire).algbw == pytest.approx(20 * MB)
    assert only(wire).busbw == pytest.approx(30 * MB), "2(n−1)/n = 1.5 for four ranks"


def test_concurrent_operations_have_no_bandwidth() -> None:
    """Two buckets: the second is enqueued while the first is in progress."""
    rows = [operation(RowKind.ALL_REDUCE, 0.0, 1.0, MB), operation(RowKind.ALL_REDUCE, 0.5, 2.0, MB)]
    wire = wire_of({0: timeline(*rows), 1: timeline(*rows)})
    traffic = only(wire)
    assert traffic.per_step == 2
    assert traffic.bytes_per_step == 2 * MB
    assert (traffic.isolated, traffic.transfer_s, traffic.busbw) == (0.0, None, None)


def test_an_operation_isolated_on_only_one_rank_does_not_count() -> None:
    apart = [operation(RowKind.ALL_REDUCE, 0.0, 1.0, MB), operation(RowKind.ALL_REDUCE, 1.5, 2.0, MB)]
    at_once = [operation(RowKind.ALL_REDUCE, 0.0, 1.6, MB), operation(RowKind.ALL_REDUCE, 1.5, 2.0, MB)]
    assert only(wire_of({0: timeline(*apart), 1: timeline(*at_once)})).isolated == 0.0


def test_a_gather_waits_for_the_last_sender_and_senders_for_the_root() -> None:
    wire = wire_of(
        {
            0: timeline(operation(RowKind.GATHER, 1.0, 3.0, 4 * MB, peer=0)),
            1: timeline(operation(RowKind.GATHER, 0.0, 1.5, 4 * MB, peer=0)),
            2: timeline(operation(RowKind.GATHER, 2.0, 2.9, 4 * MB, peer=0)),
            3: timeline(operation(RowKind.GATHER, 1.2, 2.9, 4 * MB, peer=0)),
        }
    )
    assert wire is not None
    assert wire.waits_s == pytest.approx([1.0, 1.0, 0.0, 0.0]), "the root waits for rank 2, rank 1 for the root"
    assert wire.waited_for == pytest.approx({0: 0.5, 2: 0.5})
    assert only(wire).transfer_s == pytest.approx(1.0)
    assert only(wire).busbw == pytest.approx(3 * MB), "(n−1)/n of the gathered size"


def test_a_broadcast_waits_for_its_root() -> None:
    wire = wire_of(
        {
            0: timeline(operation(RowKind.BROADCAST, 5.0, 5.5, MB, peer=0, purpose=Purpose.BUFFERS)),
            1: timeline(operation(RowKind.BROADCAST, 4.0, 5.6, MB, peer=0, purpose=Purpose.BUFFERS)),
        }
    )
    assert wire is not None
    assert wire.waits_s == pytest.approx([0.0, 1.0])
    assert only(wire).transfer_s == pytest.approx(0.6)
    assert only(wire).purpose == "buffers"
    assert wire.sent_bytes == {"buffers": [MB, 0]}
    assert wire.lower_bound_bytes is None, "no gradient was sent"


def test_a_late_receiver_does_not_make_a_broadcast_slow() -> None:
    wire = wire_of(
        {
            0: timeline(operation(RowKind.BROADCAST, 0.0, 0.01, MB, peer=0)),
            1: timeline(operation(RowKind.BROADCAST, 1.0, 1.02, MB, peer=0)),
        }
    )
    assert only(wire).transfer_s == pytest.approx(0.02)
    assert only(wire).wait_s == 0.0


def test_a_message_is_matched_by_sender_and_receiver() -> None:
    wire = wire_of(
        {
            0: timeline(operation(RowKind.RECV, 0.0, 2.0, MB, peer=1)),
            1: timeline(operation(RowKind.SEND, 1.5, 1.6, MB, peer=0)),
        },
        gradient_bytes=MB,
    )
    assert wire is not None
    received = next(traffic for traffic in wire.traffic if traffic.kind == "recv")
    assert received.transfer_s == pytest.approx(0.5)
    assert wire.waits_s == pytest.approx([1.5, 0.0])
    assert wire.waited_for == {1: 1.0}
    assert wire.sent_bytes == {"gradients": [0, MB]}
    assert wire.busiest_bytes == MB
    assert wire.lower_bound_bytes == MB


def test_messages_that_share_a_link_have_no_bandwidth() -> None:
    """Rank 0 sends to both at the same time: neither message is isolated, although each receiver has only one."""
    wire = wire_of(
        {
            0: timeline(operation(RowKind.SEND, 0.0, 1.0, MB, peer=1), operation(RowKind.SEND, 0.1, 1.0, MB, peer=2)),
            1: timeline(operation(RowKind.RECV, 0.0, 1.0, MB, peer=0)),
            2: timeline(operation(RowKind.RECV, 0.0, 1.0, MB, peer=0)),
        }
    )
    assert wire is not None
    received = next(traffic for traffic in wire.traffic if traffic.kind == "recv")
    assert (received.isolated, received.busbw) == (0.0, None)


def test_long_runs_are_sampled_from_start_to_end() -> None:
    """Rank 1 is late in the second half: the first steps alone would miss it."""

    def own(rank: int) -> Timeline:
        rows = []
        for step in range(10, 1010):
            late_s = 0.5 if rank == 1 and step >= 510 else 0.0
            rows.append(phase(RowKind.STEP, float(step), step + 0.9, step=step))
            rows.append(operation(RowKind.ALL_REDUCE, step + 0.1 + late_s, step + 0.8, MB, step=step))
        return timeline(*rows)

    wire = wire_of({0: own(0), 1: own(1)})
    assert wire is not None
    assert wire.waits_s == pytest.approx([0.25, 0.0], abs=0.01)
    assert wire.waited_for == {1: 1.0}


def test_the_warm_up_does_not_count() -> None:
    rows = [
        operation(RowKind.ALL_REDUCE, 0.0, 1.0, MB, step=0),
        phase(RowKind.STEP, 0.0, 1.0, step=0),
        operation(RowKind.ALL_REDUCE, 2.0, 2.5, MB, step=10),
        phase(RowKind.STEP, 1.5, 3.0, step=10),
    ]
    traffic = only(wire_of({0: timeline(*rows), 1: timeline(*rows)}))
    assert traffic.per_step == 1
    assert traffic.transfer_s == pytest.approx(0.5)


def test_ranks_interrupted_at_different_operations_have_no_waits() -> None:
    one = [operation(RowKind.ALL_REDUCE, 0.0, 1.0, MB)]
    wire = wire_of({0: timeline(*one), 1: timeline(*one, operation(RowKind.ALL_REDUCE, 2.0, 3.0, MB))})
    assert wire is not None
    assert wire.waits_s == [None, None]
    assert wire.wait_s is None
    assert only(wire).isolated == 0.0


def test_without_the_timelines_of_all_ranks_there_is_no_wire() -> None:
    one = timeline(operation(RowKind.ALL_REDUCE, 0.0, 1.0, MB))
    assert wire_of({}) is None
    assert wire_of({1: one}) is None
    to_another_host = timeline(operation(RowKind.SEND, 0.0, 1.0, MB, peer=2))
    assert wire_of({0: to_another_host, 1: one}) is None
    without_root = timeline(operation(RowKind.BROADCAST, 0.0, 1.0, MB))
    assert wire_of({0: without_root, 1: without_root}) is None


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (RowKind.ALL_REDUCE, 1.5),
        (RowKind.REDUCE_SCATTER, 0.75),
        (RowKind.ALL_GATHER, 0.75),
        (RowKind.GATHER, 0.75),
        (RowKind.SCATTER, 0.75),
        (RowKind.BROADCAST, 1.0),
        (RowKind.REDUCE, 1.0),
        (RowKind.SEND, 1.0),
        (RowKind.RECV, 1.0),
    ],
)
def test_bus_factors_follow_the_definitions(kind: RowKind, factor: float) -> None:
    assert bus_factor(kind, 4) == factor


@pytest.mark.parametrize(
    ("kind", "size", "root", "sent"),
    [
        ("all_reduce", 400, -1, [608, 592, 592, 608]),  # In segments of 52 bytes, the last of 36.
        ("all_reduce", 1600, -1, [2400, 2400, 2400, 2400]),
        ("gather", 400, 0, [0, 100, 100, 100]),
        ("gather", 400, 2, [100, 100, 0, 100]),
        ("scatter", 400, 0, [300, 0, 0, 0]),
        ("broadcast", 100, 0, [200, 100, 0, 0]),
        ("broadcast", 100, 1, [0, 200, 100, 0]),
        ("all_gather", 400, -1, [300, 300, 300, 300]),
        ("reduce_scatter", 1600, -1, [2400, 2400, 2400, 2400]),
        ("reduce", 1600, 0, [1200, 1600, 1600, 1600]),
        ("reduce", 1600, 2, [1600, 1600, 1200, 1600]),
        ("all_to_all", 400, -1, [300, 300, 300, 300]),
        ("send", 100, 2, [100, 100, 100, 100]),
        ("recv", 100, 2, [0, 0, 0, 0]),
        ("another", 100, 0, [0, 100, 100, 100]),
        ("barrier", 0, -1, [0, 0, 0, 0]),
    ],
)
def test_bytes_sent_follow_from_the_operation(kind: str, size: int, root: int, sent: list[int]) -> None:
    assert [sent_by_rank(kind, size, 4, root, rank) for rank in range(4)] == sent


def test_operations_of_two_groups_are_matched_by_purpose() -> None:
    """Buffers precede a slice on one rank and follow it on the other: both are isolated on both ranks."""

    def rank(slice_s: float, buffers_s: float) -> Timeline:
        return timeline(
            phase(RowKind.STEP, 0.0, 1.0),
            operation(RowKind.ALL_REDUCE, slice_s, slice_s + 0.1, MB),
            operation(RowKind.BROADCAST, buffers_s, buffers_s + 0.1, MB, peer=0, purpose=Purpose.BUFFERS),
        )

    wire = wire_of({0: rank(0.2, 0.4), 1: rank(0.4, 0.2)})
    assert wire is not None
    assert [(traffic.kind, traffic.isolated) for traffic in wire.traffic] == [("all_reduce", 1.0), ("broadcast", 1.0)]

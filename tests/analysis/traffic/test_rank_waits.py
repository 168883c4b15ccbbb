"""Waits of ranks for each other in hand-made steps."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.timelines import FIRST, operation, phase, timeline
from paceline.analysis.traffic.rank_waits import RankWaits, rank_waits
from paceline.records.timeline import Purpose, RowKind, Timeline


def waits(*timelines: Timeline) -> RankWaits:
    found = rank_waits(dict(enumerate(timelines)), np.array([FIRST], dtype=np.uint32))
    assert found is not None
    return found


def test_the_straggler_is_found_with_queued_buckets() -> None:
    """DDP with two buckets, none of which is isolated; rank 1 starts both 100 ms late."""

    def rank(late_s: float) -> Timeline:
        return timeline(
            phase(RowKind.STEP, 0.0, 1.0),
            phase(RowKind.BACKWARD, 0.1 + late_s, 0.5 + late_s),
            operation(RowKind.ALL_REDUCE, 0.4 + late_s, 0.8),
            operation(RowKind.ALL_REDUCE, 0.5 + late_s, 0.9),
        )

    found = waits(rank(0.0), rank(0.1))
    assert found.waits_s == pytest.approx([0.1, 0.0]), "from the end of its compute until rank 1 starts the second"
    assert found.waited_for == {1: 1.0}


def test_compute_during_an_operation_is_not_waiting() -> None:
    early = timeline(
        phase(RowKind.STEP, 0.0, 1.0), phase(RowKind.BACKWARD, 0.0, 0.7), operation(RowKind.ALL_REDUCE, 0.2, 0.9)
    )
    late = timeline(
        phase(RowKind.STEP, 0.0, 1.0), phase(RowKind.BACKWARD, 0.0, 0.8), operation(RowKind.ALL_REDUCE, 0.8, 0.9)
    )
    assert waits(early, late).waits_s == pytest.approx([0.1, 0.0])


def test_receives_posted_together_wait_for_each_sender() -> None:
    """p2p: rank 0 waits for rank 1, and rank 2 waits for the result that rank 0 sends only after that."""
    root = timeline(
        operation(RowKind.RECV, 0.0, 0.5, peer=1),
        operation(RowKind.RECV, 0.0, 0.5, peer=2),
        operation(RowKind.SEND, 0.5, 0.55, peer=1),
        operation(RowKind.SEND, 0.5, 0.55, peer=2),
    )
    late = timeline(operation(RowKind.SEND, 0.4, 0.45, peer=0), operation(RowKind.RECV, 0.45, 0.6, peer=0))
    early = timeline(operation(RowKind.SEND, 0.0, 0.05, peer=0), operation(RowKind.RECV, 0.05, 0.6, peer=0))
    found = waits(root, late, early)
    assert found.waits_s == pytest.approx([0.4, 0.05, 0.45])
    assert found.waited_for[1] == pytest.approx((0.4 + 0.35) / 0.9), "rank 2 until 0.4, while rank 0 waited for rank 1"
    assert found.waited_for[0] == pytest.approx((0.05 + 0.1) / 0.9), "both wait for rank 0 while it adds"


def test_waiting_for_a_root_is_attributed_to_the_rank_that_the_root_waits_for() -> None:
    root = timeline(operation(RowKind.GATHER, 0.0, 0.5, peer=0), operation(RowKind.SCATTER, 0.5, 0.6, peer=0))
    late = timeline(operation(RowKind.GATHER, 0.5, 0.5, peer=0), operation(RowKind.SCATTER, 0.5, 0.6, peer=0))
    early = timeline(operation(RowKind.GATHER, 0.0, 0.1, peer=0), operation(RowKind.SCATTER, 0.1, 0.6, peer=0))
    found = waits(root, late, early)
    assert found.waits_s == pytest.approx([0.5, 0.0, 0.4])
    assert found.waited_for == {1: pytest.approx(1.0)}


def test_circular_waits_terminate() -> None:
    """Two concurrent exchanges, each late on the other rank: each rank is visited at most once."""
    one = timeline(operation(RowKind.RECV, 0.0, 1.0, peer=1), operation(RowKind.SEND, 0.5, 1.0, peer=1))
    other = timeline(operation(RowKind.RECV, 0.0, 1.0, peer=0), operation(RowKind.SEND, 0.5, 1.0, peer=0))
    found = waits(one, other)
    assert found.waits_s == pytest.approx([0.5, 0.5])
    assert sum(found.waited_for.values()) == pytest.approx(1.0)


def test_steps_whose_operations_do_not_match_are_skipped() -> None:
    one = timeline(operation(RowKind.ALL_REDUCE, 0.0, 1.0))
    other = timeline(operation(RowKind.BROADCAST, 0.0, 1.0, peer=0))
    assert rank_waits({0: one, 1: other}, np.array([FIRST], dtype=np.uint32)) is None


def test_waits_for_operations_of_the_previous_step() -> None:
    """Rank 1 starts a slice of the first step late; both ranks wait for it in the forward pass of the next."""

    def rank(start_s: float) -> Timeline:
        return timeline(
            phase(RowKind.STEP, 0.0, 1.0),
            phase(RowKind.BACKWARD, 0.0, 1.0),
            phase(RowKind.STEP, 1.0, 2.0, step=FIRST + 1),
            phase(RowKind.FORWARD, 1.0, 2.0, step=FIRST + 1),
            operation(RowKind.ALL_REDUCE, start_s, 1.7, wait_start_s=max(start_s, 1.1)),
        )

    steps = np.array([FIRST, FIRST + 1], dtype=np.uint32)
    found = rank_waits({0: rank(0.9), 1: rank(1.4)}, steps)
    assert found is not None
    assert [2 * wait_s for wait_s in found.waits_s] == pytest.approx([0.3, 0.0]), "it does not compute from 1.1 on"
    assert found.waited_for == {1: 1.0}


def test_operations_of_two_groups_are_matched_by_purpose() -> None:
    """Buffers of a step precede the last slice of the previous step on one rank, and follow it on the other."""

    def rank(slice_s: float, buffers_s: float) -> Timeline:
        return timeline(
            phase(RowKind.STEP, 0.0, 1.0),
            operation(RowKind.ALL_REDUCE, slice_s, 0.6),
            operation(RowKind.BROADCAST, buffers_s, 0.5, peer=0, purpose=Purpose.BUFFERS),
        )

    assert waits(rank(0.3, 0.2), rank(0.1, 0.4)).waits_s == pytest.approx([0.0, 0.2])

"""`tree`: the shape of the binomial tree. Sums, bytes at sockets and parity are tested for every strategy."""

from __future__ import annotations

import pytest

from paceline.plans import Gradient, Plan
from paceline.plans.tree import ALGORITHM, plan, schedule

ITEMS = 1000


@pytest.mark.parametrize("ranks", range(2, 34))
def test_rank_0_sends_and_receives_lg_p_times_the_gradients(ranks: int) -> None:
    rounds = (ranks - 1).bit_length()
    planned = plan([Gradient("a", ITEMS)], ranks)
    assert planned.sent_bytes(0) == planned.received_bytes(0) == planned.busiest_rank_bytes(ranks) == rounds * 4 * ITEMS
    assert sum(planned.sent_bytes(rank) for rank in range(ranks)) == 2 * (ranks - 1) * 4 * ITEMS


def test_parents_have_the_lowest_bit_cleared() -> None:
    transfers = ALGORITHM.all_reduce(ITEMS, 4, 7).transfers
    up = {(t.source, t.target) for t in transfers if t.source > t.target}
    assert up == {(1, 0), (2, 0), (3, 2), (4, 0), (5, 4), (6, 4)}
    assert {(t.target, t.source) for t in transfers if t.source < t.target} == up


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_no_rank_takes_part_twice_in_a_step_of_the_reduction(ranks: int) -> None:
    for rank in range(ranks):
        messages = schedule(ITEMS, 4, rank, ranks, 2048.0)
        steps = [message.step for message in (*messages.incoming, *messages.outgoing)]
        assert len(set(steps)) == len(steps)
        assert max(steps) < 2 * (ranks - 1).bit_length()


def test_a_segment_is_sent_on_before_the_next_has_arrived() -> None:
    messages = schedule(ITEMS, 4, 2, 4, ITEMS * 4 / 4 / 1024)
    to_parent = [message.needs for message in messages.outgoing if message.peer == 0]
    assert to_parent == [1, 2, 3, 4]
    root = schedule(ITEMS, 4, 0, 4, ITEMS * 4 / 4 / 1024)
    assert [message.needs for message in root.outgoing if message.peer == 1] == [2, 4, 6, 8]
    assert isinstance(plan([], 4), Plan)

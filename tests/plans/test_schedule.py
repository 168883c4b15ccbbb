"""Schedules of all algorithms: right sums on any number of ranks; those of ring and halving-doubling: formulas."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plans import Gradient, Plan, all_reduce_lower_bound
from paceline.plans.cuts import SEGMENT_KB
from paceline.plans.schedule import AllReduceAlgorithm, Schedule
from paceline.strategies.registry import create
from registered import ALGORITHMS

RING, HALVING_DOUBLING = ALGORITHMS["ring"], ALGORITHMS["halving_doubling"]
GRADIENTS = [Gradient("a", 1000, ready_s=0.3), Gradient("b", 7, ready_s=0.2), Gradient("c", 501, 8, ready_s=0.1)]


def run_schedules(schedules: list[Schedule], items: int) -> list[list[tuple[int, ...]]]:
    """Deliver all messages; return, for each rank and item, the ranks whose values were added, in order."""
    held = [[(rank,) for _ in range(items)] for rank in range(len(schedules))]
    links: dict[tuple[int, int], deque[list[tuple[int, ...]]]] = defaultdict(deque)
    sent, taken, moved = [0] * len(schedules), [0] * len(schedules), True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            while sent[rank] < len(schedule.outgoing) and schedule.outgoing[sent[rank]].needs <= taken[rank]:
                out = schedule.outgoing[sent[rank]]
                links[rank, out.peer].append(held[rank][out.start : out.end])
                sent[rank], moved = sent[rank] + 1, True
            if taken[rank] < len(schedule.incoming) and links[schedule.incoming[taken[rank]].peer, rank]:
                message = schedule.incoming[taken[rank]]
                arrived = links[message.peer, rank].popleft()
                assert len(arrived) == message.end - message.start > 0
                for item, summands in enumerate(arrived, message.start):
                    held[rank][item] = held[rank][item] + summands if message.adds else summands
                taken[rank], moved = taken[rank] + 1, True
    assert sent == [len(schedule.outgoing) for schedule in schedules], "no rank waits for ever"
    assert taken == [len(schedule.incoming) for schedule in schedules]
    assert not any(links.values())
    return held


@pytest.mark.parametrize("name", ALGORITHMS)
@given(items=st.integers(0, 60), ranks=st.integers(1, 9), segment_items=st.integers(1, 20))
def test_every_rank_gets_every_summand_once_in_one_order(name: str, items: int, ranks: int, segment_items: int) -> None:
    schedules = [ALGORITHMS[name].schedule(items, 4, rank, ranks, segment_items * 4 / 1024) for rank in range(ranks)]
    held = run_schedules(schedules, items)
    assert all(one == held[0] for one in held), "the same order of addition gives bit-identical results"
    assert all(sorted(summands) == list(range(ranks)) for summands in held[0])


def busiest_rank_bytes(algorithm: AllReduceAlgorithm, items: int, ranks: int, segment_kb: float) -> int:
    return Plan((algorithm.all_reduce(items, 4, ranks, segment_kb),)).busiest_rank_bytes(ranks)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(items=st.integers(0, 10**7), ranks=st.integers(1, 40), segment_kb=st.floats(300, 10**5))
def test_no_all_reduce_sends_less_than_the_lower_bound(name: str, items: int, ranks: int, segment_kb: float) -> None:
    busiest = busiest_rank_bytes(ALGORITHMS[name], items, ranks, segment_kb)
    assert busiest >= all_reduce_lower_bound(items, 4, ranks)


@pytest.mark.parametrize("algorithm", [RING, HALVING_DOUBLING])
@given(items=st.integers(0, 10**7), ranks=st.integers(1, 40), segment_kb=st.floats(300, 10**5))
def test_all_ranks_send_little_more_than_the_lower_bound(
    algorithm: AllReduceAlgorithm, items: int, ranks: int, segment_kb: float
) -> None:
    bound = all_reduce_lower_bound(items, 4, ranks)
    is_even = algorithm is RING or ranks & (ranks - 1) == 0
    most = bound + 2 * 4 * ranks if is_even else 2 * bound + 2 * 4 * ranks
    assert busiest_rank_bytes(algorithm, items, ranks, segment_kb) <= most


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_messages_are_those_of_the_formulas(ranks: int) -> None:
    items = 1000 * ranks
    lg = ranks.bit_length() - 1
    for algorithm, per_rank in ((RING, 2 * (ranks - 1)), (HALVING_DOUBLING, 2 * lg)):
        operation = algorithm.all_reduce(items, 4, ranks)
        messages = [sum(t.messages for t in operation.transfers if t.source == rank) for rank in range(ranks)]
        assert messages == [per_rank] * ranks
        assert {Plan((operation,)).sent_bytes(rank) for rank in range(ranks)} == {2 * (ranks - 1) * 4000}


def test_a_ring_goes_one_way() -> None:
    operation = RING.all_reduce(100, 4, 5)
    assert {(t.source, t.target) for t in operation.transfers} == {(rank, (rank + 1) % 5) for rank in range(5)}
    assert (operation.kind, operation.algorithm, operation.bytes) == ("all_reduce", "ring", 400)


def test_ranks_beyond_a_power_of_two_have_one_partner() -> None:
    operation = HALVING_DOUBLING.all_reduce(100, 4, 6)
    assert {t.target: (t.bytes, t.messages) for t in operation.transfers if t.source == 5} == {1: (400, 1)}
    assert {t.target: (t.bytes, t.messages) for t in operation.transfers if t.source == 1 and t.target == 5} == {
        5: (400, 1)
    }


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_is_sent_next_arrives_first(ranks: int) -> None:
    """The first of several segments can be sent on before the second has arrived."""
    for algorithm in (RING, HALVING_DOUBLING):
        schedule = algorithm.schedule(64 * ranks, 4, 0, ranks, 8 * 4 / 1024)
        assert next(m.needs for m in schedule.outgoing if m.needs) == 1, algorithm.name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_plans_pack_gradients_of_one_item_size(name: str) -> None:
    plan = ALGORITHMS[name].plan(GRADIENTS, 4)
    assert [operation.bytes for operation in plan.operations] == [4028, 4008]
    assert {operation.earliest_s for operation in plan.operations} == {0.3}
    assert {operation.algorithm for operation in plan.operations} == {name}
    assert ALGORITHMS[name].plan(GRADIENTS, 1).operations == ()
    assert create(name).options.segment_kb == SEGMENT_KB

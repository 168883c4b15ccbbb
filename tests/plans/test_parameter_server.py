"""Assignment of tensors to servers, and the messages that follow from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plans import Gradient
from paceline.plans.parameter_server import MARK_BYTES, REPLY_BYTES, REQUEST_BYTES, plan, shards

GRADIENTS = [Gradient("a", 1000), Gradient("b", 7), Gradient("c", 501, 8), Gradient("d", 300)]
BYTES = 4000 + 28 + 4008 + 1200


@given(st.lists(st.integers(1, 10**6), max_size=60), st.integers(1, 9))
def test_every_tensor_has_one_server_and_none_has_much_more_than_another(sizes: list[int], servers: int) -> None:
    kept = shards(sizes, servers)
    assert sorted(number for numbers in kept for number in numbers) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in numbers) for numbers in kept]
    # The fullest server had the least bytes when it got its last tensor.
    assert all(
        load - min(loads) <= min((sizes[n] for n in own), default=0) for load, own in zip(loads, kept, strict=True)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_workers_send_all_gradients_and_get_all_weights(ranks: int, servers: int) -> None:
    whole = plan(GRADIENTS, ranks, servers=servers, extra=True)
    leads = [rank == 0 for rank in range(ranks)]
    size = BYTES + servers * MARK_BYTES
    assert [whole.sent_bytes(rank) for rank in range(ranks)] == [size + servers * REQUEST_BYTES * n for n in leads]
    assert [whole.received_bytes(rank) for rank in range(ranks)] == [size + servers * REPLY_BYTES * n for n in leads]
    assert sum(whole.sent_bytes(ranks + server) for server in range(servers)) == ranks * size + servers * REPLY_BYTES
    assert all(
        ranks <= max(link.source, link.target) and min(link.source, link.target) < ranks for link in whole.links()
    )


def test_a_server_beside_a_worker_does_not_send_to_it() -> None:
    whole = plan(GRADIENTS, 4)
    size = BYTES + MARK_BYTES
    assert [whole.sent_bytes(rank) for rank in range(4)] == [3 * size, size, size, size]
    assert [whole.received_bytes(rank) for rank in range(4)] == [3 * size, size, size, size]
    assert plan(GRADIENTS, 1).operations == ()


def test_with_a_server_on_each_rank_all_send_about_the_same() -> None:
    even = [Gradient(str(number), 100) for number in range(8)]
    whole = plan(even, 4, servers=4)
    assert {whole.sent_bytes(rank) for rank in range(4)} == {2 * 3 * (800 + MARK_BYTES)}
    assert whole.busiest_rank_bytes(4) == 2 * 3 * (800 + MARK_BYTES)


@pytest.mark.parametrize("extra", [False, True])
def test_every_asynchronous_worker_sends_requests(extra: bool) -> None:
    together, alone = (plan(GRADIENTS, 3, servers=2, extra=extra, asynchronous=value) for value in (False, True))
    marks = [2 * MARK_BYTES if extra or rank == 2 else 3 * MARK_BYTES for rank in range(3)]
    more = [alone.sent_bytes(rank) + marks[rank] - together.sent_bytes(rank) for rank in range(3)]
    if extra:
        assert more == [0, 2 * REQUEST_BYTES, 2 * REQUEST_BYTES]
    else:
        assert more == [REQUEST_BYTES + 2 * REPLY_BYTES] * 2 + [2 * REQUEST_BYTES], "the servers are on ranks 0 and 1"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_server_without_tensors_gets_no_requests(asynchronous: bool) -> None:
    whole = plan([Gradient("only", 10)], 2, servers=2, extra=True, asynchronous=asynchronous)
    assert {link.target for link in whole.links()} == {0, 1, 2}

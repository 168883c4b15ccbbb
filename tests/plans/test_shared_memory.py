"""Plan of `shared_memory`: nothing inside a host, a ring of leaders between hosts."""

from __future__ import annotations

from paceline.plans import Gradient
from paceline.plans.ring import plan as ring
from paceline.plans.shared_memory import plan

GRADIENTS = [Gradient("a", 3001), Gradient("b", 70_000, ready_s=0.1), Gradient("c", 12, 8)]
WHOLE = {"bucket_mb": 100, "first_mb": 100}


def test_nothing_is_sent_on_one_host() -> None:
    for whole in (plan(GRADIENTS, 4), plan(GRADIENTS, 4, hosts=((0, 1, 2, 3),))):
        assert whole.links() == []
        assert sum(operation.bytes for operation in whole.operations) == sum(g.bytes for g in GRADIENTS)
    assert plan(GRADIENTS, 1).operations == ()


def test_only_leaders_send_and_as_much_as_a_ring_of_them() -> None:
    found = plan(GRADIENTS, 6, hosts=((0, 2), (1, 3, 4), (5,)), **WHOLE)
    assert [found.sent_bytes(rank) for rank in (2, 3, 4)] == [0, 0, 0]
    leaders, expected = [0, 1, 5], ring(GRADIENTS, 3)
    assert [found.sent_bytes(rank) for rank in leaders] == [expected.sent_bytes(position) for position in range(3)]
    assert [(link.source, link.target) for link in found.links() if link.payload_bytes] == [(0, 1), (1, 5), (5, 0)]


def test_one_rank_per_host_is_a_ring() -> None:
    assert plan(GRADIENTS, 3, hosts=((0,), (1,), (2,)), **WHOLE).links() == ring(GRADIENTS, 3).links()


def test_a_bucket_starts_when_it_is_full() -> None:
    found = plan(GRADIENTS, 2, hosts=((0,), (1,)), bucket_mb=0.01, first_mb=0.01)
    assert [(operation.bytes, operation.earliest_s) for operation in found.operations] == [
        (12_004, 0.0),
        (280_000, 0.1),
        (96, 0.0),
    ]

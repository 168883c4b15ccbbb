"""Slices of `priority` and their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.plans import Gradient
from paceline.plans.priority import blocks, plan, schedule, slices

MIB = 2**20
KIB = 2**10


@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from("ab")), max_size=40), st.integers(1, 400))
def test_every_gradient_is_in_one_block_in_order(gradients: list[tuple[int, str]], slice_bytes: int) -> None:
    found = blocks([size for size, _ in gradients], [kind for _, kind in gradients], slice_bytes)
    assert sorted(position for block in found for position in block) == list(range(len(gradients)))
    for block in found:
        assert block == sorted(block)
        assert len({gradients[position][1] for position in block}) == 1


def test_small_layers_share_a_block_and_biases_join_their_weight() -> None:
    sizes = [10 * KIB, KIB, 100 * KIB, KIB, 700 * KIB, 2 * KIB, 2 * KIB, 9 * MIB, 2 * KIB, 600 * KIB, KIB]
    assert blocks(sizes, [0] * len(sizes), 4 * MIB) == [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]


def test_many_small_ones_do_not_end_in_one_block() -> None:
    assert {len(block) for block in blocks([KIB] * 4096, [0] * 4096, MIB)} == {256}


@given(st.integers(1, 10_000), st.sampled_from([2, 4, 8]), st.integers(1, 5000))
def test_slices_are_even_and_leave_nothing_out(items: int, item_bytes: int, slice_bytes: int) -> None:
    found = slices(items, item_bytes, slice_bytes)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == items
    lengths = [end - start for start, end in found]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) * item_bytes <= 1.5 * slice_bytes + item_bytes


def test_of_those_that_are_ready_the_one_needed_first_goes_first() -> None:
    ready_s, needed = [3.0, 3.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 2, 2, 2]
    assert schedule(ready_s, needed, [10] * 6, 0.1) == [3, 2, 4, 0, 1, 5], "each slice takes 1 s, backward 3 s"
    assert schedule(ready_s, needed, [10] * 6, 0.001) == [3, 4, 5, 2, 0, 1], "on a fast link, in the order of backward"
    assert schedule(ready_s, needed, [10] * 6, 10.0) == [3, 0, 1, 2, 4, 5], "on a slow link, in the order of forward"


def test_the_plan_has_a_ring_for_each_slice() -> None:
    gradients = [Gradient("a", MIB, ready_s=2.0), Gradient("b", 10, ready_s=2.5), Gradient("c", 3 * MIB, ready_s=1.0)]
    found = plan(gradients, 4, slice_mb=4.0)
    expected = [(4 * MIB + 40, 2.5)] + [(4 * MIB, 1.0)] * 3
    assert [(operation.bytes, operation.earliest_s) for operation in found.operations] == expected
    assert {operation.kind for operation in found.operations} == {"all_reduce"}
    assert sum(map(found.sent_bytes, range(4))) == 2 * 3 * (16 * MIB + 40)
    assert plan(gradients, 1).operations == ()

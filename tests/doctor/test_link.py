"""Tests of link measurements on real ranks: consistency of times, choice of pairs, slopes of known lines."""

from __future__ import annotations

import itertools
import time

import pytest

from paceline.comm import Comm
from paceline.doctor.contention import measure_contention
from paceline.doctor.link import (
    ALL_REDUCE_BYTES,
    MIN_SIZES,
    PAIR_BYTES,
    measure_all_reduce,
    measure_pairs,
    pairs_to_measure,
    slope,
)
from paceline.records.examination import AllReducePoint, Contention, PairLink
from ranks import Pool
from tries import eventually

LOOPBACK = (2e7, 5e10)
"""Upper bound of main memory's bytes per second, on a machine that runs other programs too."""


def pairs(comm: Comm, hosts: list[int], pair_s: float) -> list[PairLink]:
    return measure_pairs(comm, hosts, pair_s)


def all_reduce(comm: Comm, budget_s: float) -> tuple[list[AllReducePoint], float]:
    began = time.perf_counter()
    return measure_all_reduce(comm, budget_s), time.perf_counter() - began


def contention(comm: Comm) -> Contention:
    points = [AllReducePoint(size, 1e-3, 1.0, 1.0, 1) for size in ALL_REDUCE_BYTES[:6]]
    return measure_contention(comm, points, budget_s=0.4)


def test_a_pair_on_one_host(pool: Pool) -> None:
    one, other = pool.run(pairs, 2, [0, 0], 0.5)
    assert one == other
    (pair,) = one
    assert pair.ranks == [0, 1]
    assert pair.within_host
    assert 1e-6 < pair.alpha_s < 0.05
    assert LOOPBACK[0] < pair.bytes_per_s < LOOPBACK[1]
    assert pair.bytes_per_s == pytest.approx(1 / pair.beta_s_per_byte)
    assert [point.bytes for point in pair.points] == list(PAIR_BYTES[: len(pair.points)])
    assert len(pair.points) >= MIN_SIZES
    assert pair.points[-1].one_way_s > pair.alpha_s
    assert all(point.repeats >= 1 for point in pair.points)


def test_pairs_within_and_between_hosts_are_measured_apart_and_known_to_all(pool: Pool) -> None:
    answers = pool.run(pairs, 4, [0, 0, 1, 1], 0.05)
    assert answers[1:] == answers[:1] * 3
    found = {tuple(pair.ranks): pair.within_host for pair in answers[0]}
    assert found == {(0, 1): True, (2, 3): True, (0, 2): False}


def test_all_reduces_have_their_bandwidths(pool: Pool) -> None:
    (points, took_s), other = pool.run(all_reduce, 2, 0.8)
    assert points == other[0]
    assert took_s < 20
    assert [point.bytes for point in points] == list(ALL_REDUCE_BYTES[: len(points)])
    assert len(points) >= 6
    for point in points:
        assert point.algbw_bytes_per_s == pytest.approx(point.bytes / point.time_s)
        assert point.busbw_bytes_per_s == pytest.approx(point.algbw_bytes_per_s)  # 2(n − 1)/n is 1 for two.
    assert LOOPBACK[0] < max(point.busbw_bytes_per_s for point in points) < LOOPBACK[1]
    small, large = points[0], points[-1]
    assert small.time_s < large.time_s
    assert small.busbw_bytes_per_s < large.busbw_bytes_per_s


def test_busbw_of_three_ranks_has_its_factor(pool: Pool) -> None:
    points, _ = pool.run(all_reduce, 3, 0.1)[0]
    assert points[0].busbw_bytes_per_s == pytest.approx(points[0].algbw_bytes_per_s * 4 / 3)


def test_a_budget_of_nothing_still_gives_a_few_sizes(pool: Pool) -> None:
    points, took_s = pool.run(all_reduce, 2, 0.0)[0]
    assert len(points) >= MIN_SIZES
    assert {point.repeats for point in points} == {1}
    assert took_s < 20


@pytest.mark.timing
def test_all_reduces_keep_to_their_budget(pool: Pool) -> None:
    def check(_: int) -> None:
        for budget_s in (0.0, 0.8):
            assert pool.run(all_reduce, 2, budget_s)[0][1] < 5

    eventually(check)


@pytest.mark.timing
def test_contention(pool: Pool) -> None:
    def check(_: int) -> None:
        one, other = pool.run(contention, 2)
        assert one == other
        assert one.bytes == ALL_REDUCE_BYTES[5]
        assert one.flop == 2 * 384**3
        assert 1e8 < one.flop / one.matmul_alone_s < 1e13
        # Beside other work nothing gets faster, except by noise, nor slower than alternating would be.
        assert 0.7 < one.compute_factor < 50
        assert 0.5 < one.communication_factor < 50

    eventually(check)


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ([0], []),
        ([0, 0], [(0, 1)]),
        ([0, 1], [(0, 1)]),
        ([0, 0, 0], [(0, 1), (0, 2)]),
        ([0, 1, 0, 1], [(0, 2), (1, 3), (0, 1)]),
        ([0, 1, 2], [(0, 1), (0, 2), (1, 2)]),
    ],
)
def test_which_pairs_are_measured(hosts: list[int], pairs: list[tuple[int, int]]) -> None:
    assert pairs_to_measure(hosts) == pairs


def test_of_many_hosts_a_ring_is_measured_and_of_many_ranks_a_few() -> None:
    pairs = pairs_to_measure(list(range(20)))
    assert len(pairs) == 20
    assert all(sum(host in pair for pair in pairs) == 2 for host in range(20))
    assert len(pairs_to_measure([0] * 100)) == 7


def test_the_slope_is_that_of_the_line() -> None:
    sizes = [2.0**power for power in range(4)]
    assert slope(sizes, [3 + 0.5 * size for size in sizes]) == pytest.approx(0.5)
    assert all(slope(sizes, list(times)) > 0 for times in itertools.permutations([1.0, 2.0, 3.0, 4.0]))

"""Clock offsets between hosts are measured; ranks of one host have offset 0."""

from __future__ import annotations

import time

import pytest

from paceline.comm import Comm
from paceline.comm.clocks import ClockOffset, clock_offsets, measure_offsets
from ranks import Pool

AHEAD_S = 5.0


def skewed(comm: Comm, hosts: list[str]) -> list[ClockOffset]:
    """Return the offsets when each host's clock is ahead of that of the host before."""
    ahead_s = AHEAD_S * sorted(set(hosts)).index(hosts[comm.rank])
    return measure_offsets(comm, lambda: time.perf_counter() + ahead_s, clock=hosts[comm.rank])


def real_offsets(comm: Comm) -> list[float]:
    return clock_offsets(comm)


def test_a_clock_that_is_ahead_is_measured_to_within_the_error(pool: Pool) -> None:
    for offsets in pool.run(skewed, 2, ["a", "b"]):
        own, other = offsets
        assert own == (0, 0)
        assert 0 < other.error_s < 0.1
        assert other.offset_s == pytest.approx(AHEAD_S, abs=other.error_s)


def test_ranks_of_one_host_get_the_same_offset_and_every_rank_the_whole_list(pool: Pool) -> None:
    answers = pool.run(skewed, 4, ["a", "b", "a", "c"])
    assert answers[1:] == answers[:1] * 3
    first, second, third, fourth = answers[0]
    assert first == third == (0, 0)
    assert second.offset_s == pytest.approx(AHEAD_S, abs=second.error_s)
    assert fourth.offset_s == pytest.approx(2 * AHEAD_S, abs=fourth.error_s)
    answers = pool.run(skewed, 3, ["a", "b", "b"])
    assert answers[0][1] == answers[0][2] != (0, 0)


def test_one_host_has_one_clock(pool: Pool) -> None:
    assert pool.run(real_offsets, 2) == [[0.0, 0.0]] * 2

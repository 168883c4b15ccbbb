"""Judge of hangs: which ranks go on, and when none does."""

from __future__ import annotations

from typing import Any

import pytest

from comm.watchdog.statuses import status, waiting
from paceline.comm.watchdog.judge import Hang, HangJudge
from paceline.comm.watchdog.status import RankStatus


class Watched:
    """Judge of two ranks that report every second: rank 0 waits, rank 1 does what the test says."""

    def __init__(self, group_timeout_s: float = 120.0) -> None:
        self.judge = HangJudge(2, 60.0, group_timeout_s)
        self.beat = 0

    def until(
        self, end_s: int, first: dict[str, Any], second: dict[str, Any], busy: set[int] | None = None
    ) -> Hang | None:
        """Report the same statuses until a time; return the hang if there is one."""
        for now_s in range(self.beat + 1, end_s + 1):
            self.beat = now_s
            statuses = {
                0: waiting(0, **({"beat": now_s} | first)),
                1: status(1, **({"beat": now_s} | second)),
            }
            found = self.judge.observe(statuses, busy or set(), float(now_s))
            if found is not None:
                return found
        return None


def test_a_hang_is_detected_when_no_rank_goes_on_for_the_time_out() -> None:
    watched = Watched()
    assert watched.until(60, {}, {}) is None
    hang = watched.until(70, {}, {})
    assert hang is not None
    assert watched.beat == 61
    assert hang.stalled_s == {0: 60, 1: 60}
    assert not hang.silent_s
    assert {rank: found.step for rank, found in hang.statuses.items()} == {0: 412, 1: 412}


@pytest.mark.parametrize("goes_on", [{"progress": 2}, {"is_busy": True}])
def test_a_rank_that_goes_on_keeps_the_job_alive(goes_on: dict[str, Any]) -> None:
    watched = Watched()
    assert watched.until(50, {}, {}) is None
    assert watched.until(51, {}, goes_on) is None
    assert watched.until(110, {}, {"progress": goes_on.get("progress", 1)}) is None
    assert watched.until(112, {}, {"progress": goes_on.get("progress", 1)}) is not None


def test_a_rank_that_its_host_sees_computing_keeps_the_job_alive() -> None:
    """Native code that keeps Python's lock: no status arrives any more."""
    watched = Watched()
    assert watched.until(100, {}, {"beat": 1}, busy={1}) is None
    hang = watched.until(170, {}, {"beat": 1})
    assert hang is not None
    assert hang.silent_s.keys() == {1}


def test_a_busy_rank_is_named_before_the_process_group_gives_up() -> None:
    watched = Watched()
    assert watched.until(116, {}, {"is_busy": True}) is None
    assert watched.until(117, {}, {"is_busy": True}) is not None
    assert Watched(group_timeout_s=30).until(200, {}, {"is_busy": True}) is None, "Gloo is to give up first"


def test_ranks_that_all_compute_may_take_any_time() -> None:
    watched = Watched()
    assert watched.until(1000, {"operation": None, "is_busy": True}, {"is_busy": True}) is None


def test_a_rank_that_has_ended_does_not_count() -> None:
    watched = Watched()
    assert watched.until(200, {"has_ended": True}, {"has_ended": True}) is None
    watched = Watched()
    hang = watched.until(70, {"has_ended": True}, {})
    assert hang is not None
    assert list(hang.statuses) == [1]


def test_nothing_is_judged_before_all_ranks_have_reported() -> None:
    judge = HangJudge(2, 60.0, 120.0)
    one: RankStatus = status(0)
    assert all(judge.observe({0: one}, now_s=float(now_s)) is None for now_s in range(200))


def test_a_pause_of_the_judge_itself_does_not_count() -> None:
    """Ctrl-Z stops all processes, and `fg` continues them."""
    watched = Watched()
    assert watched.until(10, {}, {}) is None
    assert watched.judge.observe({0: waiting(0, beat=10), 1: status(1, beat=10)}, now_s=500.0) is None
    assert watched.judge.silent(500.0) == set()

"""Cores that other programs use and want, from counters of the host and of this process."""

from __future__ import annotations

import time

import pytest

from paceline.measure import other_programs
from paceline.measure.other_programs import OtherProgramsProbe
from paceline.measure.resources import HostProbe, HostUse


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Clocks that a test sets: wall time, CPU time of this process, and the busy share of four cores."""
    passed = {"wall_s": 100.0, "cpu_s": 7.0, "busy": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: passed["wall_s"])
    monkeypatch.setattr(time, "process_time", lambda: passed["cpu_s"])
    monkeypatch.setattr(other_programs, "affine_cores", lambda: 4)
    monkeypatch.setattr(HostProbe, "read", lambda _: HostUse(passed["busy"], None, None))
    return passed


@pytest.mark.parametrize("others", [0.0, 1.0, 3.0, 7.0, 15.0])
def test_threads_that_share_cores_fairly_are_counted(passed: dict[str, float], others: float) -> None:
    probe = OtherProgramsProbe()
    share = min(1.0, 4 / (others + 1))
    passed |= {"wall_s": 110.0, "cpu_s": 7.0 + 10 * share, "busy": min(1.0, (others + 1) / 4)}
    assert probe.elapsed_s == 10.0
    assert probe.used_cores() == pytest.approx(others * share)
    assert probe.wanted_cores() == pytest.approx(others), "also those that wait for a core"


def test_a_quota_is_no_other_program(passed: dict[str, float]) -> None:
    probe = OtherProgramsProbe()
    passed |= {"wall_s": 110.0, "cpu_s": 12.0, "busy": 0.125}
    assert probe.wanted_cores() == 0.0

"""The host's clock, with a time of our own: phases add up, micro-batches accumulate."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.measure.steps import BACKWARD, DATA, FORWARD, UPDATE, HostClock, step_clock


class Time:
    """A clock that stands still between calls of `spend`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_phases_add_up_to_the_step(ours: Time) -> None:
    clock = HostClock()
    ours.spend(5)
    clock.begin()
    for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4), (UPDATE, 8)):
        ours.spend(seconds)
        clock.lap(phase)
    times = clock.read(clock.end())
    assert times == (5, 1, 2, 4, 8)
    assert sum(times[1:]) == ours.now - 1005


def test_micro_batches_accumulate(ours: Time) -> None:
    clock = HostClock()
    clock.begin()
    for factor in (1, 10, 100):
        for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4)):
            ours.spend(factor * seconds)
            clock.lap(phase)
    ours.spend(8)
    clock.lap(UPDATE)
    assert clock.read(clock.end()) == (0, 111, 222, 444, 8)


def test_every_step_starts_afresh(ours: Time) -> None:
    clock = HostClock()
    clock.begin()
    ours.spend(3)
    clock.lap(FORWARD)
    first = clock.end()
    ours.spend(7)
    clock.begin()
    ours.spend(1)
    clock.lap(BACKWARD)
    second = clock.end()
    assert clock.read(second) == (10, 0, 0, 1, 0), "what happens between steps belongs to none"
    assert clock.read(first) == (0, 0, 3, 0, 0), "an older step is still what it was"


def test_a_cpu_is_timed_by_the_hosts_clock() -> None:
    assert isinstance(step_clock(torch.device("cpu")), HostClock)

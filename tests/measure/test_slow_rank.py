"""A rank slowed on purpose sleeps before backward in proportion to its compute; the sleep counts as CPU time."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.measure.clock import HostClock
from paceline.measure.operations import OperationLog
from paceline.measure.slow_rank import SlowRankStopwatch, stopwatch_for
from paceline.measure.steps import BACKWARD, DATA, FORWARD, OPTIMISER, PhaseTimes, Stopwatch
from paceline.records.timeline import RowKind
from tries import eventually

CPU = torch.device("cpu")
FORWARD_S, BACKWARD_S, WAIT_S = 0.004, 0.008, 0.01


def compute(seconds: float) -> None:
    """Use the given CPU time, whatever the wall time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def train(watch: Stopwatch, steps: int = 8) -> list[tuple[PhaseTimes, dict[RowKind, float], float]]:
    """Run steps of known compute with a wait in backward; return their times, CPU times by kind, and time off the CPU.

    A busy machine deschedules the thread at times. That time is not multiplied by the factor, so it is returned
    separately.
    """
    found = []
    for _ in range(steps):
        watch.begin()
        watch.lap(DATA)
        began, cpu = time.perf_counter(), time.thread_time()
        slept = watch.clock.slept_s
        compute(FORWARD_S)
        watch.lap(FORWARD)
        compute(BACKWARD_S)
        time.sleep(WAIT_S)
        watch.lap(BACKWARD)
        lost = time.perf_counter() - began - (time.thread_time() - cpu) - (watch.clock.slept_s - slept)
        watch.lap(OPTIMISER)
        times, rows = watch.read(watch.end())
        found.append((times, {RowKind(row[1]): row[8] for row in rows}, lost))
    return found


@pytest.mark.parametrize("events", [False, True])
def test_forward_and_backward_take_factor_times_as_long(events: bool) -> None:
    clock = HostClock()
    watch = SlowRankStopwatch(clock, OperationLog(clock) if events else None, factor=3)
    steps = train(watch)
    computed_s = len(steps) * (FORWARD_S + BACKWARD_S) - BACKWARD_S  # The first step has no backward pass before it.
    assert clock.slept_s == pytest.approx(2 * computed_s, rel=0.25)
    for times, _, _ in steps[1:-1]:
        assert times.forward_s >= 2 * FORWARD_S
        assert times.backward_s >= BACKWARD_S + WAIT_S  # The wait is not multiplied: slow hardware waits no longer.
    whole_s = sum(times.forward_s + times.backward_s - lost for times, _, lost in steps)
    assert whole_s == pytest.approx(3 * computed_s + BACKWARD_S, rel=0.25)


def test_the_sleep_counts_as_cpu_time() -> None:
    clock = HostClock()
    _, kinds, _ = train(SlowRankStopwatch(clock, OperationLog(clock), factor=3))[-2]
    assert kinds[RowKind.FORWARD] == pytest.approx(3 * FORWARD_S, rel=0.35)
    assert kinds[RowKind.BACKWARD] == pytest.approx(3 * BACKWARD_S, rel=0.35)


def test_with_half_a_core_each_second_of_compute_takes_two() -> None:
    clock = HostClock()
    steps = train(SlowRankStopwatch(clock, None, factor=2, core_share=0.5), steps=4)
    computed_s = len(steps) * (FORWARD_S + BACKWARD_S) - BACKWARD_S
    assert clock.slept_s == pytest.approx(2 * computed_s, rel=0.25)


def test_backward_starts_late() -> None:
    def check(_: int) -> None:
        watch = SlowRankStopwatch(HostClock(), None, factor=3)
        train(watch, steps=2)
        watch.begin()
        watch.lap(DATA)
        compute(FORWARD_S)
        before = watch.clock.slept_s
        watch.lap(FORWARD)
        assert watch.clock.slept_s - before == pytest.approx(2 * (FORWARD_S + BACKWARD_S), rel=0.35)
        after = watch.clock.slept_s
        compute(BACKWARD_S)
        watch.lap(BACKWARD)
        assert watch.clock.slept_s == after

    eventually(check)  # The time of backward is taken from earlier steps, which other programs may have delayed.


def test_a_rank_that_is_not_slowed_has_a_plain_stopwatch() -> None:
    assert type(stopwatch_for(CPU, events=False, factor=1, core_share=0.5)) is Stopwatch
    slowed = stopwatch_for(CPU, events=True, factor=2, core_share=0.5)
    assert isinstance(slowed, SlowRankStopwatch)
    assert slowed.operations is not None


@pytest.mark.gpu
@pytest.mark.parametrize("events", [False, True])
def test_a_gpu_is_slowed_in_proportion_to_its_compute_time(events: bool) -> None:
    device = torch.device("cuda")
    weights = torch.randn(2048, 2048, device=device, requires_grad=True)

    def steps(factor: float) -> float:
        """Return the seconds of forward and backward in the last of six steps."""
        watch = stopwatch_for(device, events=events, factor=factor, core_share=0.25)
        times = None
        for _ in range(6):
            watch.begin()
            watch.lap(DATA)
            value = weights
            for _ in range(40):
                value = value @ weights / 64
            watch.lap(FORWARD)
            watch.watch_backward(value)
            value.backward(torch.ones_like(value))
            watch.lap(BACKWARD)
            watch.lap(OPTIMISER)
            times, _ = watch.read(watch.end())
        assert times is not None
        return times.forward_s + times.backward_s

    plain_s = steps(1)
    assert steps(3) == pytest.approx(3 * plain_s, rel=0.3)

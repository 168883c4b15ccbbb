"""The stopwatch on a simulated clock: phases and micro-batches add up, waiting is separated from compute."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from device_clock import DeviceClock
from paceline.measure.clock import HostClock, clock_for
from paceline.measure.operations import OperationLog
from paceline.measure.steps import BACKWARD, DATA, FORWARD, OPTIMISER, Laps, Stopwatch, make_stopwatch
from paceline.records.timeline import NO_PEER, Purpose, RowKind

CPU = torch.device("cpu")


class SimulatedTime:
    """Wall clock and CPU clock that advance only in `spend`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu = 50.0

    def spend(self, seconds: float, cpu: float | None = None) -> None:
        """Advance both clocks; the compute thread gets `cpu` seconds of CPU time, or all of it."""
        self.now += seconds
        self.cpu += seconds if cpu is None else cpu


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    clock = SimulatedTime()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "thread_time", lambda: clock.cpu)
    return clock


def plain() -> Stopwatch:
    return Stopwatch(HostClock())


def with_events() -> Stopwatch:
    clock = HostClock()
    return Stopwatch(clock, OperationLog(clock))


def summary(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return kind, start, end and CPU time of rows."""
    return [(row[1], row[5], row[6], row[8]) for row in rows]


@pytest.mark.parametrize("make", [plain, with_events])
def test_phases_add_up_to_the_step(simulated: SimulatedTime, make: Any) -> None:
    watch = make()
    simulated.spend(5)
    watch.begin()
    for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4), (OPTIMISER, 8)):
        simulated.spend(seconds)
        watch.lap(phase)
    times, _ = watch.read(watch.end())
    assert times == (5, 1, 2, 4, 8)
    assert sum(times[1:]) == simulated.now - 1005


@pytest.mark.parametrize("make", [plain, with_events])
def test_micro_batches_accumulate(simulated: SimulatedTime, make: Any) -> None:
    watch = make()
    watch.begin()
    for factor in (1, 10, 100):
        for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4)):
            simulated.spend(factor * seconds)
            watch.lap(phase)
    simulated.spend(8)
    watch.mark_agreed()
    simulated.spend(16)
    watch.lap(OPTIMISER)
    times, rows = watch.read(watch.end())
    assert times == (0, 111, 222, 444, 24)
    kinds = [RowKind.STEP, *[RowKind.DATA, RowKind.FORWARD, RowKind.BACKWARD] * 3, RowKind.OPTIMISER]
    assert [row[1] for row in rows] == (kinds if make is with_events else [])


@pytest.mark.parametrize("make", [plain, with_events])
def test_every_step_starts_at_zero(simulated: SimulatedTime, make: Any) -> None:
    watch = make()
    watch.begin()
    simulated.spend(3)
    watch.lap(FORWARD)
    first = watch.end()
    simulated.spend(7)
    watch.begin()
    simulated.spend(1)
    watch.lap(BACKWARD)
    second = watch.end()
    assert watch.read(second)[0] == (10, 0, 0, 1, 0), "time between steps belongs to no step"
    assert watch.read(first)[0] == (0, 0, 3, 0, 0), "an older step is unchanged"


def test_times_count_from_the_origin(simulated: SimulatedTime) -> None:
    watch = plain()
    watch.clock.set_origin(origin_s=990.0)
    simulated.spend(5)
    assert watch.clock.now() == 15
    watch.begin()
    assert watch.read(watch.end())[0].start_s == 15


def test_the_rows_of_a_step(simulated: SimulatedTime) -> None:
    """Data from 1 to 2 s with half a second of CPU time; then forward, backward, agreement, optimiser."""
    watch = with_events()
    simulated.spend(1)
    watch.begin()
    simulated.spend(1, cpu=0.5)
    watch.lap(DATA)
    simulated.spend(2)
    watch.lap(FORWARD)
    simulated.spend(4, cpu=3)
    watch.lap(BACKWARD)
    simulated.spend(8, cpu=0)
    watch.mark_agreed()
    simulated.spend(16)
    watch.lap(OPTIMISER)
    _, rows = watch.read(watch.end())
    assert summary(rows[1:]) == [
        (RowKind.DATA, 1, 2, 0.5),
        (RowKind.FORWARD, 2, 4, 2),
        (RowKind.BACKWARD, 4, 8, 3),
        (RowKind.OPTIMISER, 16, 32, 16),
    ]
    kind, start_s, end_s, cpu_s = summary(rows)[0]
    assert (kind, start_s, end_s) == (RowKind.STEP, 1, 32)
    assert math.isnan(cpu_s)
    assert {(row[0], row[2], row[3], row[4]) for row in rows} == {(0, Purpose.NOTHING, NO_PEER, 0)}


class Slow(torch.autograd.Function):
    """Operation that takes one second in forward and two in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, simulated: SimulatedTime) -> torch.Tensor:
        ctx.simulated = simulated
        simulated.spend(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.simulated.spend(2)
        return grad * 2, None


class Engine:
    """Backward passes that wait for the operations started in them, as under DDP."""

    def __init__(self, simulated: SimulatedTime, watch: Stopwatch) -> None:
        self.simulated, self.watch = simulated, watch
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.stop = watch.watch_gradients(self.layers.parameters())

    def one_step(self, send: Any) -> list[tuple[Any, ...]]:
        """Run 1 s of forward, 2 s of backward, a call of `send` at the last gradient, and 8 s of waiting."""
        self.watch.begin()
        loss = Slow.apply(self.layers(torch.ones(1, 2)), self.simulated).sum()
        self.watch.lap(FORWARD)
        self.watch.watch_backward(loss)
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: self.wait(send)))
        loss.backward()
        self.watch.lap(BACKWARD)
        times, rows = self.watch.read(self.watch.end())
        assert times[2:4] == (1, 10), "the phase includes waiting in the table of steps"
        return [
            (kind, start_s - times.start_s, end_s - times.start_s, cpu_s)
            for kind, start_s, end_s, cpu_s in summary(rows)
        ]

    def wait(self, send: Any) -> None:
        send(self.watch.operations)
        self.simulated.spend(8, cpu=0)


FORWARD_ROW = (RowKind.FORWARD, 0, 1, 1)
UNTIL_LAST_GRADIENT = (RowKind.BACKWARD, 1, 3, 2)
ALL_OF_IT = (RowKind.BACKWARD, 1, 11, 2)


def start_by_engine(log: OperationLog) -> None:
    log.mark_engine_start(log.start(RowKind.ALL_REDUCE, 2**30, NO_PEER))


def start_by_hook(log: OperationLog) -> None:
    log.has_async_operations = True


def test_compute_ends_when_the_engine_sends_the_last_gradients(simulated: SimulatedTime) -> None:
    engine = Engine(simulated, with_events())
    for _ in range(3):
        assert engine.one_step(start_by_engine)[1:] == [FORWARD_ROW, UNTIL_LAST_GRADIENT]
    assert engine.one_step(lambda _: None)[1:] == [FORWARD_ROW, ALL_OF_IT], (
        "no operation was started that it could wait for"
    )
    assert not any(parameter._post_accumulate_grad_hooks for parameter in engine.layers.parameters())


def test_an_operation_before_backward_does_not_end_backward(simulated: SimulatedTime) -> None:
    watch = with_events()
    watch.begin()
    start_by_engine(watch.operations)
    simulated.spend(1)
    watch.lap(FORWARD)
    simulated.spend(2)
    watch.lap(BACKWARD)
    _, rows = watch.read(watch.end())
    assert summary(rows)[1:] == [FORWARD_ROW, UNTIL_LAST_GRADIENT]


def test_gradients_are_watched_if_hooks_start_operations(simulated: SimulatedTime) -> None:
    """A DDP communication hook starts operations; the wait for them cannot be observed."""
    engine = Engine(simulated, with_events())
    engine.one_step(start_by_hook)
    for _ in range(5):
        assert engine.one_step(start_by_hook)[1:] == [FORWARD_ROW, UNTIL_LAST_GRADIENT]
    engine.stop()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in engine.layers.parameters())
    assert engine.one_step(start_by_hook)[1:] == [FORWARD_ROW, ALL_OF_IT]


def test_polling_is_enough_for_the_last_small_operation_of_the_engine() -> None:
    """Earlier operations may end while gradients are computed, and a large one takes long to copy."""
    log = with_events().operations
    found = []
    for step, kinds in enumerate(
        [[RowKind.ALL_REDUCE] * 3, [RowKind.ALL_REDUCE] * 3, [RowKind.BROADCAST, *[RowKind.ALL_REDUCE] * 3]]
    ):
        log.begin_step(step)
        found.append([log.mark_engine_start(log.start(kind, 10, NO_PEER)) for kind in kinds])
    log.begin_step(3)
    found.append([log.mark_engine_start(log.start(RowKind.ALL_REDUCE, size, NO_PEER)) for size in (10, 10, 2**20)])
    assert found == [[False] * 3, [False, False, True], [False, False, False, True], [False] * 3]


def test_the_optimiser_starts_once_and_after_backward(simulated: SimulatedTime) -> None:
    """An optimiser that steps inside backward does not end it; the first call after backward counts."""
    watch = with_events()
    watch.begin()
    simulated.spend(1)
    watch.lap(FORWARD)
    simulated.spend(2)
    watch.mark_agreed()
    simulated.spend(2)
    watch.lap(BACKWARD)
    for seconds in (8, 16):
        simulated.spend(seconds)
        watch.mark_agreed()
    simulated.spend(32)
    watch.lap(OPTIMISER)
    times, rows = watch.read(watch.end())
    assert times == (0, 0, 1, 4, 56)
    assert summary(rows[1:]) == [
        (RowKind.FORWARD, 0, 1, 1),
        (RowKind.BACKWARD, 1, 5, 4),
        (RowKind.OPTIMISER, 13, 61, 48),
    ]


def test_a_step_whose_optimiser_is_deferred_has_no_time_of_an_optimiser(simulated: SimulatedTime) -> None:
    watch = with_events()
    watch.begin()
    for phase, seconds in ((FORWARD, 1), (BACKWARD, 2), (OPTIMISER, 4)):
        simulated.spend(seconds)
        watch.lap(phase)
    times, rows = watch.read(watch.end())
    assert times == (0, 0, 1, 2, 4), "the time belongs to the update"
    assert [row[1] for row in rows] == [RowKind.STEP, RowKind.FORWARD, RowKind.BACKWARD]


def test_operations_of_a_cancelled_step_are_discarded(simulated: SimulatedTime) -> None:
    watch = with_events()
    log = watch.operations
    for completes in (True, False, True):
        watch.begin()
        simulated.spend(1)
        log.end(log.start(RowKind.ALL_REDUCE, 8, NO_PEER))
        watch.lap(FORWARD)
        watch.end() if completes else watch.drop()
    assert [(row[0], row[5]) for row in log.take_rows()] == [(0, 1), (1, 3)]


def test_without_events_nothing_is_hooked(simulated: SimulatedTime) -> None:
    watch, layer = plain(), nn.Linear(2, 2)
    watch.watch_gradients(layer.parameters())()
    layer(torch.ones(1, 2)).sum().backward()
    watch.begin()
    simulated.spend(3)
    watch.mark_agreed()
    simulated.spend(4)
    watch.lap(OPTIMISER)
    assert watch.read(watch.end()) == ((0, 0, 0, 0, 7), [])


def test_steps_that_are_not_kept_have_times_but_no_rows(simulated: SimulatedTime) -> None:
    watch = with_events()
    kept = []
    for step in range(1300):
        watch.begin()
        simulated.spend(1)
        watch.lap(FORWARD)
        watch.operations.end(watch.operations.start(RowKind.ALL_REDUCE, 4, NO_PEER))
        times, rows = watch.read(watch.end())
        assert times.forward_s == 1
        recorded = {row[0] for row in [*rows, *watch.operations.take_rows()]}
        assert recorded <= {step}
        kept += recorded
    assert kept == list(range(1100))


def test_a_step_without_data_is_cancelled(simulated: SimulatedTime) -> None:
    watch = with_events()
    watch.begin()
    watch.drop()
    evaluated = watch.operations.start(RowKind.BROADCAST, 4, 0)
    assert not evaluated.is_kept, "operations of an evaluation belong to no step"
    watch.operations.end(evaluated)
    simulated.spend(5)
    watch.begin()
    simulated.spend(1)
    watch.lap(FORWARD)
    _, rows = watch.read(watch.end())
    assert [(row[0], row[5], row[6]) for row in rows] == [(0, 5, 6)] * 2


def test_operations(simulated: SimulatedTime) -> None:
    watch = with_events()
    log = watch.operations
    assert not log.start(RowKind.ALL_REDUCE, 8, NO_PEER).is_kept, "no step has begun"
    watch.begin()
    hidden = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
    simulated.spend(1)
    with log.carrying(Purpose.BUFFERS):
        at_once = log.start(RowKind.BROADCAST, 16, 0, blocking=True)
    simulated.spend(2)
    log.mark_waiting(at_once)
    log.end(at_once)
    log.mark_waiting(hidden)
    simulated.spend(4)
    log.mark_waiting(hidden)
    log.end(hidden)
    simulated.spend(8)
    log.end(hidden)
    log.mark_waiting(hidden)
    watch.end()
    assert not log.start(RowKind.ALL_REDUCE, 8, NO_PEER).is_kept
    broadcast, reduce = log.take_rows()
    assert broadcast[:8] == (0, RowKind.BROADCAST, Purpose.BUFFERS, 0, 16, 1, 3, 1), (
        "a blocking operation is waited for from its start"
    )
    assert reduce[:8] == (0, RowKind.ALL_REDUCE, Purpose.GRADIENTS, NO_PEER, 8, 0, 7, 3), "only the first call counts"
    assert log.take_rows() == []


def test_another_thread_starts_operations_for_a_step_that_has_ended(simulated: SimulatedTime) -> None:
    watch = with_events()
    log = watch.operations
    watch.begin()
    step = log.step
    watch.end()
    sent: list[Any] = []

    def send() -> None:
        with log.on_behalf_of(step):
            sent.extend(log.start(RowKind.ALL_REDUCE, size, NO_PEER) for size in (1, 2, 3))

    watch.begin()
    with log.carrying(Purpose.BUFFERS):
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
    simulated.spend(1)
    with log.idle():
        simulated.spend(2)
        log.end(sent[0])
        simulated.spend(4)
        log.end(sent[1])
    simulated.spend(8)
    log.end(sent[2])
    watch.end()
    rows = [(row[0], row[2], *row[4:7]) for row in log.take_rows()]
    assert rows == [(0, Purpose.GRADIENTS, size, 0, end_s) for size, end_s in ((1, 3), (2, 7), (3, 15))]


def test_an_idle_thread_waits_for_operations_that_end_meanwhile(simulated: SimulatedTime) -> None:
    watch = with_events()
    log = watch.operations
    watch.begin()
    first, second, third = (log.start(RowKind.ALL_REDUCE, 8, NO_PEER) for _ in range(3))
    simulated.spend(1)
    with log.idle():
        simulated.spend(2)
        log.end(first)
        later = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
        simulated.spend(4)
        log.end(later)
        log.mark_waiting(second)
        simulated.spend(8)
        log.end(second)
    simulated.spend(16)
    log.end(third)
    watch.end()
    waited = [row[7] for row in log.take_rows()]
    assert waited[:3] == [1, 3, 7], "from the start of idling, or of the operation"
    assert math.isnan(waited[3]), "the compute thread was computing again at its end"


def test_an_end_that_is_reported_late_is_detected_after_backward(simulated: SimulatedTime) -> None:
    watch = with_events()
    log = watch.operations
    watch.begin()
    done = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
    log.poll_later(done, lambda: True)
    still = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
    log.poll_later(still, lambda: False)
    simulated.spend(2)
    watch.lap(BACKWARD)
    simulated.spend(1)
    log.end(done)
    simulated.spend(1)
    log.end(still)
    watch.end()
    assert [row[6] for row in log.take_rows()] == [2, 4]


def test_ends_reported_by_many_threads_are_recorded_once() -> None:
    watch = with_events()
    log = watch.operations
    watch.begin()
    operations = [log.start(RowKind.ALL_REDUCE, number, NO_PEER) for number in range(2000)]
    taken: list[Any] = []
    threads = [threading.Thread(target=lambda: [log.end(operation) for operation in operations]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += log.take_rows()
    taken += log.take_rows()
    assert sorted(row[4] for row in taken) == list(range(2000))


def test_a_cpu_is_timed_by_the_hosts_clock() -> None:
    assert isinstance(clock_for(CPU), HostClock)
    assert make_stopwatch(CPU, events=False).operations is None
    assert make_stopwatch(CPU, events=True).operations is not None


def train_on_device(watch: Stopwatch, weights: torch.Tensor) -> Laps:
    """Train one step as the loop does; return its marks."""
    watch.begin()
    watch.lap(DATA)
    loss = (weights * weights).sum()
    watch.lap(FORWARD)
    watch.watch_backward(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    watch.lap(BACKWARD)
    watch.mark_agreed()
    watch.lap(OPTIMISER)
    return watch.end()


def test_on_a_gpu_only_recorded_steps_have_all_marks() -> None:
    clock = DeviceClock()
    watch, weights = Stopwatch(clock, OperationLog(clock)), torch.ones(3, requires_grad=True)
    steps = [train_on_device(watch, weights) for _ in range(30)]
    marks = [1 + len(laps.ends) for laps in steps]
    assert marks == [7] * 20 + [5] * 10, "the last gradient and the start of the optimiser are marked in recorded steps"
    assert clock.made == sum(marks)
    found = watch.read_all(steps)
    assert clock.waits == [clock.made], "one wait for all steps"
    assert sorted(clock.released) == list(range(1, clock.made + 1))
    for number, (times, rows) in enumerate(found):
        assert sum(times[1:]) == marks[number] - 1, "phases add up to the step"
        assert bool(rows) == (number < 20)
        assert {row[0] for row in rows} <= {number}


def test_without_events_a_step_on_a_gpu_has_a_mark_per_phase() -> None:
    watch = Stopwatch(DeviceClock())
    laps = train_on_device(watch, torch.ones(3, requires_grad=True))
    assert [phase for phase, _, _ in laps.ends] == [DATA, FORWARD, BACKWARD, OPTIMISER]


def test_steps_that_the_device_has_completed() -> None:
    clock = DeviceClock()
    watch, weights = Stopwatch(clock), torch.ones(3, requires_grad=True)
    steps = [train_on_device(watch, weights) for _ in range(7)]
    for reached, expected in ((0, 0), (4, 0), (5, 1), (9, 1), (10, 2), (34, 6), (35, 7)):
        clock.reached = reached
        assert watch.count_ended(steps) == expected
    assert clock.waits == []
    assert watch.count_ended([]) == 0


def test_sampled_blocks_are_whole_periods_of_the_strategy() -> None:
    clock = DeviceClock()
    log, on_host = OperationLog(clock), OperationLog(HostClock())
    log.sample_periods(8)
    on_host.sample_periods(8)
    assert [step for step in range(320) if log.begin_step(step)] == [*range(32), *range(160, 176)]
    assert all(on_host.begin_step(step) for step in range(320))


def test_operations_that_the_device_has_not_reached_are_left_for_later() -> None:
    clock = DeviceClock()
    log = OperationLog(clock)
    log.begin_step(0)
    for _ in range(3):
        log.end(log.start(RowKind.ALL_REDUCE, 8, NO_PEER))
    clock.reached = 4
    assert [(row[5], row[6]) for row in log.take_rows(wait=False)] == [(1, 2), (3, 4)]
    assert log.take_rows(wait=False) == []
    assert [(row[5], row[6]) for row in log.take_rows()] == [(5, 6)]


@pytest.mark.gpu
def test_events_of_a_gpu_are_read_in_order() -> None:
    device = torch.device("cuda")
    watch, weights = make_stopwatch(device, events=True), torch.ones(512, 512, device=device, requires_grad=True)
    steps = [train_on_device(watch, weights) for _ in range(40)]
    found = watch.read_all(steps)
    assert watch.count_ended(steps) == 40
    starts = [times.start_s for times, _ in found]
    assert starts == sorted(starts)
    assert all(sum(times[1:]) > 0 for times, _ in found)
    assert [bool(rows) for _, rows in found] == [step < 20 for step in range(40)]

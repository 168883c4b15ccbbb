"""The stopwatch, with a time of our own: phases add up, micro-batches accumulate, waits are told from computing."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline.measure.clock import HostClock, clock_for
from paceline.measure.operations import OperationLog
from paceline.measure.steps import BACKWARD, DATA, FORWARD, OPTIMISER, Stopwatch, make_stopwatch
from paceline.records.timeline import NO_PEER, Purpose, RowKind

CPU = torch.device("cpu")


class Time:
    """Clocks that stand still between calls of `spend`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu = 50.0

    def spend(self, seconds: float, cpu: float | None = None) -> None:
        """Lets time pass; the computing thread gets all of it, or less."""
        self.now += seconds
        self.cpu += seconds if cpu is None else cpu


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "thread_time", lambda: clock.cpu)
    return clock


def plain() -> Stopwatch:
    return Stopwatch(HostClock())


def with_events() -> Stopwatch:
    clock = HostClock()
    return Stopwatch(clock, OperationLog(clock))


def summary(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Kind, start, end, processor time."""
    return [(row[1], row[5], row[6], row[8]) for row in rows]


@pytest.mark.parametrize("make", [plain, with_events])
def test_phases_add_up_to_the_step(ours: Time, make: Any) -> None:
    watch = make()
    ours.spend(5)
    watch.begin()
    for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4), (OPTIMISER, 8)):
        ours.spend(seconds)
        watch.lap(phase)
    times, _ = watch.read(watch.end())
    assert times == (5, 1, 2, 4, 8)
    assert sum(times[1:]) == ours.now - 1005


@pytest.mark.parametrize("make", [plain, with_events])
def test_micro_batches_accumulate(ours: Time, make: Any) -> None:
    watch = make()
    watch.begin()
    for factor in (1, 10, 100):
        for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4)):
            ours.spend(factor * seconds)
            watch.lap(phase)
    ours.spend(8)
    watch.agreed()
    ours.spend(16)
    watch.lap(OPTIMISER)
    times, rows = watch.read(watch.end())
    assert times == (0, 111, 222, 444, 24)
    kinds = [RowKind.STEP, *[RowKind.DATA, RowKind.FORWARD, RowKind.BACKWARD] * 3, RowKind.OPTIMISER]
    assert [row[1] for row in rows] == (kinds if make is with_events else [])


@pytest.mark.parametrize("make", [plain, with_events])
def test_every_step_starts_afresh(ours: Time, make: Any) -> None:
    watch = make()
    watch.begin()
    ours.spend(3)
    watch.lap(FORWARD)
    first = watch.end()
    ours.spend(7)
    watch.begin()
    ours.spend(1)
    watch.lap(BACKWARD)
    second = watch.end()
    assert watch.read(second)[0] == (10, 0, 0, 1, 0), "what happens between steps belongs to none"
    assert watch.read(first)[0] == (0, 0, 3, 0, 0), "an older step is still what it was"


def test_times_count_from_the_start_that_ranks_agreed_on(ours: Time) -> None:
    watch = plain()
    watch.clock.start(origin_s=990.0)
    ours.spend(5)
    assert watch.clock.now() == 15
    watch.begin()
    assert watch.read(watch.end())[0].start_s == 15


def test_the_rows_of_a_step(ours: Time) -> None:
    """From 1 to 2 data, of which the thread gets half; then forward, backward, agreement, the optimiser."""
    watch = with_events()
    ours.spend(1)
    watch.begin()
    ours.spend(1, cpu=0.5)
    watch.lap(DATA)
    ours.spend(2)
    watch.lap(FORWARD)
    ours.spend(4, cpu=3)
    watch.lap(BACKWARD)
    ours.spend(8, cpu=0)
    watch.agreed()
    ours.spend(16)
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
    """Takes a second in forward and two in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ours: Time) -> torch.Tensor:
        ctx.ours = ours
        ours.spend(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.ours.spend(2)
        return grad * 2, None


class Engine:
    """Backward passes that wait for what was sent in them, as DDP's do."""

    def __init__(self, ours: Time, watch: Stopwatch) -> None:
        self.ours, self.watch = ours, watch
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.stop = watch.watch_gradients(self.layers.parameters())

    def one_step(self, send: Any) -> list[tuple[Any, ...]]:
        """A second forward, two backward, a call of `send` with the last gradient, and eight seconds of waiting."""
        self.watch.begin()
        loss = Slow.apply(self.layers(torch.ones(1, 2)), self.ours).sum()
        self.watch.lap(FORWARD)
        self.watch.watch_backward(loss)
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: self.wait(send)))
        loss.backward()
        self.watch.lap(BACKWARD)
        times, rows = self.watch.read(self.watch.end())
        assert times[2:4] == (1, 10), "waiting is a part of the phase in the table of steps"
        return [
            (kind, start_s - times.start_s, end_s - times.start_s, cpu_s)
            for kind, start_s, end_s, cpu_s in summary(rows)
        ]

    def wait(self, send: Any) -> None:
        send(self.watch.operations)
        self.ours.spend(8, cpu=0)


FORWARD_ROW = (RowKind.FORWARD, 0, 1, 1)
UNTIL_LAST_GRADIENT = (RowKind.BACKWARD, 1, 3, 2)
ALL_OF_IT = (RowKind.BACKWARD, 1, 11, 2)


def by_engine(log: OperationLog) -> None:
    log.by_engine(log.start(RowKind.ALL_REDUCE, 2**30, NO_PEER))


def by_a_hook(log: OperationLog) -> None:
    log.left_open = True


def test_computing_ends_when_the_engine_sends_the_last_gradients(ours: Time) -> None:
    engine = Engine(ours, with_events())
    for _ in range(3):
        assert engine.one_step(by_engine)[1:] == [FORWARD_ROW, UNTIL_LAST_GRADIENT]
    assert engine.one_step(lambda _: None)[1:] == [FORWARD_ROW, ALL_OF_IT], "nothing was sent that it could wait for"
    assert not any(parameter._post_accumulate_grad_hooks for parameter in engine.layers.parameters())


def test_what_the_engine_sends_before_backward_is_not_its_end(ours: Time) -> None:
    watch = with_events()
    watch.begin()
    by_engine(watch.operations)
    ours.spend(1)
    watch.lap(FORWARD)
    ours.spend(2)
    watch.lap(BACKWARD)
    _, rows = watch.read(watch.end())
    assert summary(rows)[1:] == [FORWARD_ROW, UNTIL_LAST_GRADIENT]


def test_gradients_are_watched_where_hooks_leave_operations_open(ours: Time) -> None:
    """A hook of DDP's that sends: who waits for it cannot be seen."""
    engine = Engine(ours, with_events())
    engine.one_step(by_a_hook)
    for _ in range(5):
        assert engine.one_step(by_a_hook)[1:] == [FORWARD_ROW, UNTIL_LAST_GRADIENT]
    engine.stop()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in engine.layers.parameters())
    assert engine.one_step(by_a_hook)[1:] == [FORWARD_ROW, ALL_OF_IT]


def test_the_last_small_one_of_the_engine_need_not_be_told() -> None:
    """As in the step before; others may go on while gradients are computed, and a large one is long to copy."""
    log = with_events().operations
    found = []
    for step, kinds in enumerate(
        [[RowKind.ALL_REDUCE] * 3, [RowKind.ALL_REDUCE] * 3, [RowKind.BROADCAST, *[RowKind.ALL_REDUCE] * 3]]
    ):
        log.begin_step(step)
        found.append([log.by_engine(log.start(kind, 10, NO_PEER)) for kind in kinds])
    log.begin_step(3)
    found.append([log.by_engine(log.start(RowKind.ALL_REDUCE, size, NO_PEER)) for size in (10, 10, 2**20)])
    assert found == [[False] * 3, [False, False, True], [False, False, False, True], [False] * 3]


def test_the_optimiser_starts_once_and_after_backward(ours: Time) -> None:
    """Whoever says so: an optimiser that steps inside backward does not end it, and the first word after it counts."""
    watch = with_events()
    watch.begin()
    ours.spend(1)
    watch.lap(FORWARD)
    ours.spend(2)
    watch.agreed()
    ours.spend(2)
    watch.lap(BACKWARD)
    for seconds in (8, 16):
        ours.spend(seconds)
        watch.agreed()
    ours.spend(32)
    watch.lap(OPTIMISER)
    times, rows = watch.read(watch.end())
    assert times == (0, 0, 1, 4, 56)
    assert summary(rows[1:]) == [
        (RowKind.FORWARD, 0, 1, 1),
        (RowKind.BACKWARD, 1, 5, 4),
        (RowKind.OPTIMISER, 13, 61, 48),
    ]


def test_what_was_sent_in_a_step_that_does_not_take_place_is_forgotten(ours: Time) -> None:
    watch = with_events()
    log = watch.operations
    for takes_place in (True, False, True):
        watch.begin()
        ours.spend(1)
        log.end(log.start(RowKind.ALL_REDUCE, 8, NO_PEER))
        watch.lap(FORWARD)
        watch.end() if takes_place else watch.drop()
    assert [(row[0], row[5]) for row in log.take_rows()] == [(0, 1), (1, 3)]


def test_without_events_nothing_is_hooked(ours: Time) -> None:
    watch, layer = plain(), nn.Linear(2, 2)
    watch.watch_gradients(layer.parameters())()
    layer(torch.ones(1, 2)).sum().backward()
    watch.begin()
    ours.spend(3)
    watch.agreed()
    ours.spend(4)
    watch.lap(OPTIMISER)
    assert watch.read(watch.end()) == ((0, 0, 0, 0, 7), [])


def test_steps_that_are_not_kept_have_times_but_no_rows(ours: Time) -> None:
    watch = with_events()
    kept = []
    for step in range(1300):
        watch.begin()
        ours.spend(1)
        watch.lap(FORWARD)
        operation = watch.operations.start(RowKind.ALL_REDUCE, 4, NO_PEER)
        if operation is not None:
            watch.operations.end(operation)
        times, rows = watch.read(watch.end())
        assert times.forward_s == 1
        noted = {row[0] for row in [*rows, *watch.operations.take_rows()]}
        assert noted <= {step}
        kept += noted
    assert kept == list(range(1100))


def test_a_step_for_which_there_was_no_data_did_not_take_place(ours: Time) -> None:
    watch = with_events()
    watch.begin()
    watch.drop()
    assert watch.operations.start(RowKind.BROADCAST, 4, 0) is None, "what an evaluation sends is part of no step"
    ours.spend(5)
    watch.begin()
    ours.spend(1)
    watch.lap(FORWARD)
    _, rows = watch.read(watch.end())
    assert [(row[0], row[5], row[6]) for row in rows] == [(0, 5, 6)] * 2


def test_operations(ours: Time) -> None:
    watch = with_events()
    log = watch.operations
    assert log.start(RowKind.ALL_REDUCE, 8, NO_PEER) is None, "no step has begun"
    watch.begin()
    hidden = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
    ours.spend(1)
    with log.carrying(Purpose.BUFFERS):
        at_once = log.start(RowKind.BROADCAST, 16, 0, blocking=True)
    ours.spend(2)
    log.waiting(at_once)
    log.end(at_once)
    log.waiting(hidden)
    ours.spend(4)
    log.waiting(hidden)
    log.end(hidden)
    ours.spend(8)
    log.end(hidden)
    log.waiting(hidden)
    watch.end()
    assert log.start(RowKind.ALL_REDUCE, 8, NO_PEER) is None
    broadcast, reduce = log.take_rows()
    assert broadcast[:8] == (0, RowKind.BROADCAST, Purpose.BUFFERS, 0, 16, 1, 3, 1), "who waits at once waits all along"
    assert reduce[:8] == (0, RowKind.ALL_REDUCE, Purpose.GRADIENTS, NO_PEER, 8, 0, 7, 3), "only the first is heard"
    assert log.take_rows() == []


def test_another_thread_sends_for_a_step_that_has_ended(ours: Time) -> None:
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
    ours.spend(1)
    with log.idle():
        ours.spend(2)
        log.end(sent[0])
        ours.spend(4)
        log.end(sent[1])
    ours.spend(8)
    log.end(sent[2])
    watch.end()
    rows = [(row[0], row[2], *row[4:7]) for row in log.take_rows()]
    assert rows == [(0, Purpose.GRADIENTS, size, 0, end_s) for size, end_s in ((1, 3), (2, 7), (3, 15))]


def test_who_waits_for_another_thread_waits_for_what_ends_meanwhile(ours: Time) -> None:
    watch = with_events()
    log = watch.operations
    watch.begin()
    first, second, third = (log.start(RowKind.ALL_REDUCE, 8, NO_PEER) for _ in range(3))
    ours.spend(1)
    with log.idle():
        ours.spend(2)
        log.end(first)
        later = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
        ours.spend(4)
        log.end(later)
        log.waiting(second)
        ours.spend(8)
        log.end(second)
    ours.spend(16)
    log.end(third)
    watch.end()
    waited = [row[7] for row in log.take_rows()]
    assert waited[:3] == [1, 3, 7], "since it began to wait, or since that had started"
    assert math.isnan(waited[3]), "it computed again when that one ended"


def test_an_end_that_its_thread_tells_too_late_is_seen_after_backward(ours: Time) -> None:
    watch = with_events()
    log = watch.operations
    watch.begin()
    done = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
    log.look_after(done, lambda: True)
    still = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
    log.look_after(still, lambda: False)
    ours.spend(2)
    watch.lap(BACKWARD)
    ours.spend(1)
    log.end(done)
    ours.spend(1)
    log.end(still)
    watch.end()
    assert [row[6] for row in log.take_rows()] == [2, 4]


def test_ends_told_by_many_threads_are_all_there_once() -> None:
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

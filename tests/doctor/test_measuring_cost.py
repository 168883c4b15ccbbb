"""Tests of the measured cost of events on real ranks: small, and larger if recording is slowed down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from paceline.comm import Comm, World, open_comm
from paceline.config import RunConfig
from paceline.doctor.measuring_cost import measure_cost
from paceline.measure.operations import OperationLog
from paceline.measure.steps import make_stopwatch
from paceline.records.examination import MeasuringCost
from paceline.training.graphs import capture
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool
from training.graphs.recorded_graph import RecordingCapturer
from tries import eventually

HERE = __name__
CPU = torch.device("cpu")
BURNT_S = 0.002


def middling() -> Workload:
    """Workload with a few milliseconds per step and twenty steps per epoch."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    x = torch.randn(640, 256)
    return Workload(model=model, train=(x, x.argmax(1) % 3), loss=F.cross_entropy)


def batches() -> Workload:
    """Workload on an iterable of batches of unknown length."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), torch.randn(8, 4)
    return Workload(model=model, train=_Batches([(x, x.argmax(1) % 3)] * 5), loss=F.cross_entropy)


class _Batches:
    def __init__(self, content: list[Any]) -> None:
        self._content = content

    def __iter__(self) -> Iterator[Any]:
        return iter(self._content)


def once() -> Workload:
    """Workload on batches that can be iterated only once."""
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    return Workload(model=model, train=iter([(x, x.argmax(1) % 3)] * 100), loss=F.cross_entropy)


def burn() -> None:
    end_s = time.thread_time() + BURNT_S
    while time.thread_time() < end_s:
        pass


def measure(
    _: Comm, settings: dict[str, Any], slow: bool = False, budget_s: float = 0.5
) -> tuple[MeasuringCost | None, int]:
    """Measure on the first two ranks; return also the number of open groups. All ranks must help to open groups."""
    rank, groups = dist.get_rank(), len(dist.distributed_c10d._world.pg_map)
    config = RunConfig(**{"batch": 32, "lr": 0.001} | settings)
    if rank >= 2:
        dist.all_reduce(torch.tensor(1), dist.ReduceOp.MIN)
        active = [0] if config.strategy == "single" else [0, 1]
        for events in (True, False):
            open_comm(active, device=CPU, backend="gloo", timeout_s=30, stopwatch=make_stopwatch(CPU, events=events))
        return None, 0
    store = dist.PrefixStore("cost", dist.distributed_c10d._get_default_store())
    world = World(rank, 2, local_rank=rank, local_size=2, interface="lo", ranks_sharing_cores=2, store=store)
    begin_step = OperationLog.begin_step

    def begin_slowly(log: OperationLog, step: int) -> bool:
        burn()
        return begin_step(log, step)

    with patch.object(OperationLog, "begin_step", begin_slowly if slow else begin_step):
        found = measure_cost(config, world, threads=1, budget_s=budget_s)
    return found, len(dist.distributed_c10d._world.pg_map) - groups


def cost(pool: Pool, *, slow: bool = False, budget_s: float = 0.5, **settings: Any) -> MeasuringCost:
    first, second, *_ = pool.run(measure, SIZE, settings, slow, budget_s)
    assert first == second, "every rank knows the sum of all"
    found, left = first
    assert found is not None
    assert left == 0
    return found


@pytest.mark.timing
def test_events_cost_a_fraction_and_what_they_cost_is_seen(pool: Pool) -> None:
    def check(_: int) -> None:
        usual = cost(pool, workload=f"{HERE}:middling", strategy="ddp")
        slow = cost(pool, workload=f"{HERE}:middling", strategy="ddp", slow=True)
        assert (usual.workload, usual.strategy) == (f"{HERE}:middling", "ddp")
        assert usual.pairs >= 6
        assert usual.steps >= 1
        assert usual.low <= usual.share <= usual.high
        assert usual.share < 0.5
        expected = BURNT_S / usual.step_cpu_s
        assert 0.4 * expected < slow.share - usual.share < 3 * expected

    eventually(check)


@pytest.mark.timing
def test_events_cost_a_small_share_of_a_step_of_the_default_workload(pool: Pool) -> None:
    def check(_: int) -> None:
        assert -0.2 < cost(pool, workload="cnn", strategy="ddp", budget_s=2.0).share < 0.3

    eventually(check)


def test_other_strategies_and_data_of_unknown_length(pool: Pool) -> None:
    assert cost(pool, workload=f"{HERE}:batches", strategy="p2p", bn="sync").share < 2


def test_ranks_that_stay_idle_wait(pool: Pool) -> None:
    first, second, *_ = pool.run(measure, SIZE, {"workload": f"{HERE}:middling", "strategy": "single"})
    assert first[0] is not None
    assert second == (None, 0)


def test_data_that_can_be_gone_through_only_once_is_left_alone(pool: Pool) -> None:
    answers = pool.run(measure, SIZE, {"workload": f"{HERE}:once", "strategy": "allreduce"})
    assert answers[:2] == [(None, 0)] * 2


def measure_crowded(comm: Comm) -> MeasuringCost | None:
    """Measure as if the last run had needed more memory on rank 1 than is free."""
    world = World(
        comm.rank,
        SIZE,
        local_rank=comm.rank,
        local_size=SIZE,
        interface="lo",
        ranks_sharing_cores=SIZE,
        store=dist.HashStore(),
    )
    needed = 2**50 if comm.rank == 1 else 0
    with patch("paceline.doctor.measuring_cost.peak_bytes", lambda _: needed):
        return measure_cost(RunConfig(workload=f"{HERE}:middling"), world, threads=1)


def test_without_room_for_two_nothing_is_tried(pool: Pool) -> None:
    assert pool.run(measure_crowded, SIZE) == [None] * SIZE


def measure_with_graphs(comm: Comm) -> tuple[MeasuringCost | None, int]:
    """Measure the cost in steps that are replayed from graphs, which a run without a monitor captures."""
    capture.CAPTURERS["cpu"] = RecordingCapturer
    try:
        settings = {"workload": f"{HERE}:middling", "strategy": "allreduce", "cuda_graph": "on"}
        return measure(comm, settings, budget_s=0.2)
    finally:
        del capture.CAPTURERS["cpu"]


def test_the_cost_is_measured_in_steps_with_graphs_too(pool: Pool) -> None:
    first, second, *_ = pool.run(measure_with_graphs, SIZE)
    assert first == second
    assert first[0] is not None

"""Tests of the loop's time split in real runs, against PyTorch's profiler, the strategy `none` and a late rank."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import ProfilerActivity, profile

from paceline.analysis.steps.split import split_of
from paceline.comm import Comm, World, clocks, open_comm
from paceline.config import RunConfig, Script
from paceline.measure.steps import make_stopwatch
from paceline.records import RunFolder, read_run
from paceline.records.summary import Split, UntrackedCounts
from paceline.records.timeline import Purpose, RowKind, Timeline
from paceline.strategies.base.strategy import Strategy
from paceline.strategies.ddp import Ddp
from paceline.strategies.registry import create
from paceline.training.run import run
from paceline.training.scripts.script_task import ScriptFinished
from paceline.training.scripts.script_timing import TimingTask
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool
from training import cases
from tries import eventually

pytestmark = pytest.mark.timing
HERE = __name__
CPU = torch.device("cpu")
WARM_UP = 5
LATE_S = 0.1


# Workloads.


def wide() -> Workload:
    """Return a workload with enough computation, and six layers of a megabyte to send."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    x = torch.randn(640, 512)
    return Workload(model=nn.Sequential(*layers, nn.Linear(512, 3)), train=(x, x.argmax(1) % 3), loss=F.cross_entropy)


WIDE_BYTES = 4 * (6 * (512 * 512 + 512) + 3 * 512 + 3)


def small_bn() -> Workload:
    """Return a model with two BatchNorm layers, of 4 and 6 channels."""
    return cases.small_bn()


def late() -> Workload:
    """Return a workload in which rank 1 sleeps in every forward pass after the warm-up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    calls = itertools.count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) > WARM_UP and dist.get_rank() == 1:  # The first call is the check before the first step.
            time.sleep(LATE_S)
        return F.cross_entropy(output, target)

    x = torch.randn(90, 64)
    return Workload(model=model, train=(x, x.argmax(1) % 3), loss=loss)


class Hooked(Ddp):
    """DDP with a communication hook that sends from Python; DDP waits for it in C++."""

    name: ClassVar[str] = "hooked"

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(self.comm.group, allreduce_hook)
        return wrapped


# Runs on ranks of the pool.


def train(_: Comm, settings: dict[str, Any], folder: str, ranks: int) -> None:
    """Run on the first ranks; all ranks must help to open groups."""
    rank = dist.get_rank()
    if rank >= ranks:
        open_comm(range(ranks), device=CPU, backend="gloo", timeout_s=30, stopwatch=make_stopwatch(CPU, events=True))
        return
    world = World(
        rank, ranks, local_rank=rank, local_size=ranks, interface="lo", ranks_sharing_cores=1, store=dist.HashStore()
    )
    config = RunConfig(**{"batch_per_rank": 8, "steps": 10, "evaluate": False, "lr": 0.001} | settings)
    run(config, world, RunFolder(Path(folder)), threads=1)


def timelines(pool: Pool, folder: Path, ranks: int = 2, **settings: Any) -> dict[int, Timeline]:
    settings["workload"] = f"{HERE}:{settings['workload']}"
    pool.run(train, SIZE, settings, str(RunFolder.create(folder).path), ranks)
    return read_run(folder).timelines


def splits(found: dict[int, Timeline]) -> list[Split]:
    by_rank = [split_of(found[rank]) for rank in sorted(found)]
    assert all(split is not None for split in by_rank)
    return [split for split in by_rank if split is not None]


def steps_of(timeline: Timeline) -> list[Any]:
    """Return the operations of each step after the warm-up."""
    operations = timeline.operations
    return [operations[operations["step"] == step] for step in timeline.steps["step"] if step >= WARM_UP]


# PyTorch's profiler.


class Seen(NamedTuple):
    """Operation in the profiler's trace, by its clock, from the start of Gloo's thread."""

    name: str
    bytes: int
    """0 if the profiler does not report it."""
    start_s: float
    end_s: float


def train_profiled(comm: Comm, settings: dict[str, Any], folder: str) -> list[Seen]:
    if dist.get_rank() >= 2:
        train(comm, settings, folder, 2)
        return []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        train(comm, settings, folder, 2)
    found = [
        Seen(
            event.name,
            4 * math.prod(next(iter(event.input_shapes), [0])),
            event.time_range.start / 1e6,
            event.time_range.end / 1e6,
        )
        for event in profiler.events()
        if event.name.startswith("gloo:")
    ]
    return sorted(found, key=lambda seen: seen.start_s)


@pytest.mark.parametrize(
    ("strategy", "names", "smallest"),
    [("ddp:bucket_mb=1", {"gloo:all_reduce"}, 2**20), ("gather_scatter", {"gloo:gather", "gloo:scatter"}, 0)],
)
def test_the_profiler_sees_the_same_operations(
    pool: Pool, tmp_path: Path, strategy: str, names: set[str], smallest: int
) -> None:
    """The loop's control group runs all-reduces too, but small ones."""

    def check(attempt: int) -> None:
        folder = RunFolder.create(tmp_path / str(attempt)).path
        settings = {"workload": f"{HERE}:wide", "strategy": strategy, "batch_per_rank": 64}
        profiles = pool.run(train_profiled, SIZE, settings, str(folder))[:2]
        for rank, seen in enumerate(profiles):
            operations = read_run(folder).timelines[rank].operations
            ours = operations[(operations["purpose"] == Purpose.GRADIENTS) & (operations["bytes"] >= smallest)]
            theirs = [event for event in seen if event.name in names and event.bytes >= smallest]
            assert [f"gloo:{RowKind(kind).title}" for kind in ours["kind"]] == [event.name for event in theirs]
            assert len(ours) >= 50
            starts, ends = np.array([[event.start_s, event.end_s] for event in theirs]).T
            # Our event starts before Gloo's and ends after it; the difference of the clocks' zero points is removed.
            before, after = ours["start_s"] - starts, ours["end_s"] - ends
            lag_s = median(after) - max(before)
            assert 0 <= lag_s < 0.5 * median(ends - starts)

    eventually(check)


# Strategies against each other.


def test_none_sends_nothing_and_computes_as_much_as_ddp(pool: Pool, tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        alone, together = (
            timelines(pool, tmp_path / f"{strategy}-{attempt}", workload="wide", strategy=strategy, batch_per_rank=64)
            for strategy in ("none", "ddp")
        )
        for rank, (none, ddp) in enumerate(zip(splits(alone), splits(together), strict=True)):
            assert len(alone[rank].operations) == 0
            assert none.overlap is None
            assert none.communication_s == 0
            assert ddp.communication_s > 0
            assert none.compute_s > 0.7 * none.step_s
            # Without the time that other processes took; communication still costs cache and memory bandwidth.
            assert 0.7 < (ddp.computing_s - ddp.descheduled_s) / (none.computing_s - none.descheduled_s) < 1.4

    eventually(check)


def test_ddp_hides_what_it_sends_and_does_not_when_it_holds_it_back(pool: Pool, tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        hidden, held = (
            timelines(pool, tmp_path / f"{number}-{attempt}", workload="wide", strategy=strategy, batch_per_rank=64)
            for number, strategy in enumerate(("ddp:bucket_mb=1", "ddp:bucket_mb=1,overlap=false"))
        )
        for ddp, after in zip(splits(hidden), splits(held), strict=True):
            assert after.overlap == pytest.approx(0, abs=0.02)
            assert after.exposed_s == pytest.approx(after.communication_s, rel=0.02)
            assert ddp.overlap is not None
            assert ddp.overlap > 0.3
            assert ddp.exposed_s < 0.7 * after.exposed_s
        for found in (hidden, held):
            for operations in steps_of(found[0]):
                assert operations["bytes"].sum() == WIDE_BYTES

    eventually(check)


# A late rank.


@pytest.mark.parametrize("strategy", ["ddp", f"{HERE}:Hooked", "allreduce", "gather_scatter", "p2p"])
def test_a_late_rank_is_exposed_communication_on_the_others(pool: Pool, tmp_path: Path, strategy: str) -> None:
    def check(attempt: int) -> None:
        found = timelines(pool, tmp_path / str(attempt), 3, workload="late", strategy=strategy, steps=8)
        first, late, third = splits(found)
        for other in (first, third):
            assert 0.9 * LATE_S < other.exposed_s < 1.3 * LATE_S
            assert other.computing_s < 0.2 * LATE_S, "waiting is not computing"
        assert late.exposed_s < 0.2 * LATE_S, "it is waited for, and waits for nobody"
        assert late.compute_s > 0.9 * LATE_S
        assert late.descheduled_s > 0.9 * LATE_S, "asleep, it got no processor"

    eventually(check)


def measured_script(comm: Comm, folder: str, agrees: bool) -> None:
    """Run a user's loop in which rank 1 is late; ranks may average a figure before they train."""
    config = RunConfig(strategy="ddp", steps=8)
    task = TimingTask(script=Script(path="there/train.py"), config=config, folder=RunFolder(Path(folder)))
    stopwatch = task.stopwatch(CPU)
    ours = open_comm(range(2), device=CPU, backend="gloo", timeout_s=30, stopwatch=stopwatch)
    if ours is None:
        return
    model = nn.Linear(64, 64)
    with task.attach(model, lambda p: torch.optim.SGD(p, lr=0.1), create("ddp"), ours, "local") as sync:
        try:
            while True:
                if comm.rank == 1:
                    time.sleep(LATE_S)
                if agrees:
                    assert sync.mean(comm.rank) == 0.5
                sync.model(torch.ones(4, 64)).sum().backward()
                sync.step()
        except ScriptFinished:
            pass


@pytest.mark.parametrize("agrees", [False, True])
def test_a_late_rank_of_a_script(pool: Pool, tmp_path: Path, agrees: bool) -> None:
    def check(attempt: int) -> None:
        folder = RunFolder.create(tmp_path / str(attempt)).path
        pool.run(measured_script, SIZE, str(folder), agrees)
        record = read_run(folder)
        first, late = splits(record.timelines)
        assert first.data_s < 0.2 * LATE_S
        assert median(record.steps[0]["data_s"]) < 0.2 * LATE_S, "nor is it in the table of steps"
        assert 0.9 * LATE_S < first.exposed_s < 1.3 * LATE_S
        assert first.computing_s < 0.2 * LATE_S
        assert late.exposed_s < 0.2 * LATE_S
        assert late.data_s > 0.9 * LATE_S

    eventually(check)


class Stream:
    """Global batches of unknown number, which arrive late on rank 1."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(6):
            if dist.get_rank() == 1:
                time.sleep(LATE_S / 2)
            yield torch.ones(16, 64), torch.zeros(16, dtype=torch.long)


def streamed() -> Workload:
    torch.manual_seed(0)
    return Workload(model=nn.Linear(64, 3), train=Stream(), loss=F.cross_entropy)


def test_late_data_is_data_on_its_own_rank_alone(pool: Pool, tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        folder = tmp_path / str(attempt)
        found = timelines(pool, folder, workload="streamed", strategy="none", steps=10, batch_per_rank=None)
        first, late = splits(found)
        assert 0.8 * LATE_S / 2 < first.exposed_s < 1.4 * LATE_S / 2
        assert first.data_s < 0.2 * LATE_S / 2
        assert median(read_run(folder).steps[0]["data_s"]) < 0.2 * LATE_S / 2
        assert late.data_s > 0.9 * LATE_S / 2
        assert late.exposed_s < 0.2 * LATE_S / 2
        for timeline in found.values():
            operations = timeline.operations
            assert list(operations["step"]) == list(range(10)), "the end of an epoch is no step"
            assert set(operations["purpose"]) == {Purpose.CONTROL}

    eventually(check)


# Strategies written by a user.


class ByItself(Strategy):
    """Strategy that communicates in its own `step`, through the default group or one that it creates."""

    def make_group(self) -> dist.ProcessGroup | None:
        return None

    def wrap(self, model: nn.Module) -> nn.Module:
        self.group = self.make_group()
        return model

    def step(self, max_norm: float | None = None) -> None:  # noqa: ARG002
        time.sleep(SPENT_S)  # Stands for the strategy's computation.
        for _, parameter in self.parameters:
            dist.all_reduce(parameter.grad, group=self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()


class InDefaultGroup(ByItself):
    name = "in_default_group"


class InOwnGroup(ByItself):
    name = "in_own_group"

    def make_group(self) -> dist.ProcessGroup | None:
        return dist.new_group([0, 1, 2, 3])

    def close(self) -> None:
        dist.destroy_process_group(self.group)
        super().close()


class InSubgroup(ByItself):
    name = "in_subgroup"

    def make_group(self) -> dist.ProcessGroup | None:
        groups = [self.comm.subgroup(ranks) for ranks in ((0, 1), (2, 3))]
        return groups[self.comm.rank // 2]


SPENT_S = 0.02
ALL_REDUCES = 2 * 10
"""Parameters of a linear layer, steps."""


def linear() -> Workload:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    return Workload(model=nn.Linear(64, 3), train=(x, x.argmax(1) % 3), loss=F.cross_entropy)


@pytest.mark.parametrize(
    ("strategy", "untracked"),
    [
        ("InDefaultGroup", {"groups": 0, "operations": ALL_REDUCES}),
        ("InOwnGroup", {"groups": 1, "operations": ALL_REDUCES}),
        ("InSubgroup", {"groups": 0, "operations": 0}),
    ],
)
def test_a_strategy_that_sends_past_us_is_found_out(
    pool: Pool, tmp_path: Path, strategy: str, untracked: dict[str, int]
) -> None:
    def check(attempt: int) -> None:
        folder = tmp_path / str(attempt)
        settings = {"workload": "linear", "strategy": f"{HERE}:{strategy}", "replica_guard": "off"}
        found = timelines(pool, folder, SIZE, **settings)  # Pairs that average apart from each other drift apart.
        summary = read_run(folder).summary
        assert summary is not None
        assert summary.untracked == UntrackedCounts(**untracked)
        for timeline in found.values():
            assert len(timeline.operations) == (0 if any(untracked.values()) else ALL_REDUCES)
        for split in splits(found):
            assert split.computing_s < 0.5 * SPENT_S, "what comes before the optimiser is not computing"
            assert split.other_s > 0.9 * SPENT_S

    eventually(check)


# BatchNorm.


def bytes_by_purpose(timeline: Timeline) -> list[dict[tuple[RowKind, Purpose], list[int]]]:
    """Return the sizes of all messages per step."""
    found = []
    for operations in steps_of(timeline):
        sizes: dict[tuple[RowKind, Purpose], list[int]] = {}
        for row in operations:
            sizes.setdefault((RowKind(row["kind"]), Purpose(row["purpose"])), []).append(int(row["bytes"]))
        found.append(sizes)
    return found


CHANNELS = (4, 6)
GRADIENT_BYTES = 4 * sum(p.numel() for p in small_bn().model.parameters())
STATISTICS = {
    (RowKind.ALL_GATHER, Purpose.STATISTICS): [2 * 4 * (2 * channels + 2) for channels in CHANNELS],
    (RowKind.ALL_REDUCE, Purpose.STATISTICS): [4 * (2 * channels + 1) for channels in reversed(CHANNELS)],
}
"""In forward every rank gathers means, squares and a count; in backward, from the last layer on, two sums are added.
Every message also has the number of its layer."""
BUFFER_BYTES = 8 + sum(4 * 2 * channels + 8 for channels in CHANNELS)
"""A header; of each layer, means and variances, and the number of batches in 64 bits."""


@pytest.mark.parametrize(
    ("bn", "others"),
    [
        ("local", {}),
        ("broadcast", {(RowKind.BROADCAST, Purpose.BUFFERS): [BUFFER_BYTES]}),
        ("sync", STATISTICS),
    ],
)
def test_what_is_sent_is_for_what_it_says(pool: Pool, tmp_path: Path, bn: str, others: dict[Any, Any]) -> None:
    found = timelines(pool, tmp_path / "run", workload="small_bn", strategy="ddp", bn=bn)
    expected = {(RowKind.ALL_REDUCE, Purpose.GRADIENTS): [GRADIENT_BYTES], **others}
    assert len(found) == 2
    assert all(split.communication_s > 0 for split in splits(found))
    waits = (Purpose.BUFFERS, Purpose.STATISTICS)
    for timeline in found.values():
        assert bytes_by_purpose(timeline) == [expected] * 5
        for row in timeline.operations[np.isin(timeline.operations["purpose"], waits)]:
            assert row["wait_start_s"] == row["start_s"], "forward and backward stand still meanwhile"


# Clocks with an offset.

AHEAD_S = 5.0


def train_with_another_clock(comm: Comm, settings: dict[str, Any], folder: str) -> None:
    """Run as if rank 1 were on another host, whose clock is ahead."""
    if dist.get_rank() != 1:
        train(comm, settings, folder, 2)
        return
    real = time.perf_counter
    with (
        patch.object(clocks, "clock_id", lambda: "another host"),
        patch.object(time, "perf_counter", new=lambda: real() + AHEAD_S),
    ):
        train(comm, settings, folder, 2)


def test_clocks_that_are_apart_are_laid_side_by_side(pool: Pool, tmp_path: Path) -> None:
    settings = {"workload": f"{HERE}:late", "strategy": "allreduce"}
    pool.run(train_with_another_clock, SIZE, settings, str(RunFolder.create(tmp_path / "run").path))
    first, other = read_run(tmp_path / "run").timelines.values()
    ends = [timeline.operations["end_s"] for timeline in (first, other)]
    assert len(ends[0]) == len(ends[1]) > 20
    # An all-reduce ends on all ranks at about the same time, whichever rank arrived last.
    assert median(np.abs(ends[0] - ends[1])) < 0.1 * LATE_S

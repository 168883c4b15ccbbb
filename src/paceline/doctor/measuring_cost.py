"""What collecting events costs a step, measured: the same workload with it and without it, in turn, on the same data.

Processor time of all threads, since wall time on a busy machine says more about the machine. What samples resources
goes on beside both sides alike, and is not part of it: it keeps an account of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from paceline.analysis.statistics import overhead_share
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.measure.capacity import available_memory_bytes, memory_limits
from paceline.measure.memory import peak_bytes
from paceline.records import RunFolder, StepWriter
from paceline.records.examination import MeasuringCost
from paceline.records.timeline import TimelineWriter
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create
from paceline.training.loop import TrainingLoop
from paceline.training.rank_setup import RankSetup, set_up_rank
from paceline.training.run import optimizer_factory
from paceline.training.run_recorder import silent
from paceline.training.step_recorder import StepRecorder
from paceline.training.sync import Sync
from paceline.training.windows import Windows
from paceline.workloads.batches import Piece

BUDGET_S = 5.0
BLOCK_S = 0.05
"""A block is about this long: enough for a clock, and short, so that the machine is in the same mood for both."""
WARM_UP_STEPS = 4
"""Reducers build their buckets in the second, allocators and caches fill."""
FEWEST_PAIRS = 6
MOST_BUDGETS = 4
"""Workloads whose steps are so long that the fewest pairs take more than this many budgets are not measured: there,
events cost nothing that could be seen."""


def measure_cost(
    config: RunConfig, world: World, *, threads: int | None, number: int = 0, budget_s: float = BUDGET_S
) -> MeasuringCost | None:
    """Measures it, after a run of the same workload; called on all ranks.

    None on ranks that stay idle, and on all of them where it cannot be measured.
    """
    if Role.SERVER in create(config.strategy).roles(world.size):  # A rank cannot serve two trainings at once.
        return None
    room = torch.tensor(int(_has_room(world.local_size)))
    dist.all_reduce(room, dist.ReduceOp.MIN)
    if not room:
        return None
    stages = [set_up_rank(replace(config, events=events), world, threads, timed=True) for events in (True, False)]
    done = f"cost-{number}"
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, ExitStack() as stack:
        sides = [
            stack.enter_context(TimedTraining(setup, Path(folder) / name))
            for setup, name in zip(stages, ("with", "without"), strict=True)
            if setup is not None
        ]
        if not sides:
            world.wait_for(done)
            return None
        found = _compare(sides[0], sides[1], budget_s)
        if sides[0].comm.rank == 0:
            world.announce(done)
    return found


def _has_room(local_ranks: int) -> bool:
    """Whether there is memory for two trainings at once on every rank of the host, as far as the last run tells."""
    host = torch.device("cpu")
    grown = max(0, (peak_bytes(host) or 0) - psutil.Process().memory_info().rss)
    free = available_memory_bytes(memory_limits(), psutil.virtual_memory().available)
    if 2 * grown * local_ranks > free:
        return False
    if not torch.cuda.is_initialized():
        return True
    free_on_gpu, _ = torch.cuda.mem_get_info()
    return 2 * torch.cuda.max_memory_allocated() < free_on_gpu


class TimedTraining:
    """One rank's training of the workload, with events or without, a few steps at a time."""

    def __init__(self, setup: RankSetup, folder: Path) -> None:
        config, self.comm, self._stopwatch = setup.config, setup.comm, setup.stopwatch
        self.name = setup.workload.name
        self.strategy = config.strategy
        self._source = setup.source()
        self.can_start_again = self._source.peek(1) is not None
        """Data that can be gone through only once cannot be shared by two sides."""
        self._sync = Sync(setup.model, optimizer_factory(config, setup.workload), setup.strategy, self.comm, config.bn)
        place = RunFolder.create(folder)
        self._steps = StepWriter(place, self.comm.rank)
        self._timeline = TimelineWriter(place.path, self.comm.rank) if config.events else None
        self._ledger = StepRecorder(self._stopwatch, self._steps, self._timeline)
        windows = Windows(self._sync, self._ledger, config.log_every, silent)
        self._loop = TrainingLoop(
            config, setup.workload, self._sync, self._source, self._stopwatch, self._ledger, windows, silent
        )
        self._epoch = -1
        self._batches: Iterator[list[Piece]] = iter(())

    def train(self, steps: int) -> TimedSteps:
        """Trains some steps, and writes them down; ranks begin together."""
        self._stopwatch.next_step = 0  # In a long run fewer steps are kept, and cost less.
        self.comm.smallest(0)
        before_s, cpu_before_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._train_step()
        self._sync.strategy.finish()
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
            self._stopwatch.clock.anchor()
        self._ledger.settle()
        return TimedSteps(time.process_time() - cpu_before_s, time.perf_counter() - before_s)

    def _train_step(self) -> None:
        if self._loop.train_step(self._epoch, self._batches):
            return
        self._epoch += 1
        self._batches = self._source.epoch(self._epoch)
        if not self._loop.train_step(self._epoch, self._batches):
            raise WorkloadError(f"the training data gave no batch in epoch {self._epoch + 1}.")

    def __enter__(self) -> TimedTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self._steps.close()
        if self._timeline is not None:
            self._timeline.close()
        if error[0] is None:
            self._sync.close()


@dataclass(frozen=True)
class TimedSteps:
    """What some steps took on one rank."""

    cpu_s: float
    wall_s: float


def _compare(with_it: TimedTraining, without: TimedTraining, budget_s: float) -> MeasuringCost | None:
    comm = with_it.comm
    if not comm.smallest(with_it.can_start_again):
        return None
    for side in (with_it, without):
        side.train(WARM_UP_STEPS)
    step_s = comm.largest(without.train(WARM_UP_STEPS).wall_s / WARM_UP_STEPS)
    steps = max(1, round(BLOCK_S / step_s))
    pair_s = 2 * steps * step_s
    if FEWEST_PAIRS * pair_s > MOST_BUDGETS * budget_s:
        return None
    pairs = max(FEWEST_PAIRS, round(budget_s / pair_s))
    on, off = _cpu_of_pairs(with_it, without, steps, pairs, comm)
    share = overhead_share(on, off)
    assert share is not None
    assert share.low is not None
    assert share.high is not None
    step_cpu_s = sorted(off)[pairs // 2] / steps / comm.world_size
    return MeasuringCost(
        workload=with_it.name,
        strategy=with_it.strategy,
        share=share.value,
        low=share.low,
        high=share.high,
        pairs=pairs,
        steps=steps,
        step_cpu_s=step_cpu_s,
    )


def _cpu_of_pairs(
    with_it: TimedTraining, without: TimedTraining, steps: int, pairs: int, comm: Comm
) -> tuple[list[float], list[float]]:
    """Processor time of blocks over all ranks, in the order ABBA, so that what changes slowly favours neither."""
    sides, blocks = (with_it, without), torch.empty(pairs, 2, dtype=torch.float64)
    for pair in range(pairs):
        for turn in (0, 1) if pair % 2 == 0 else (1, 0):
            blocks[pair, turn] = sides[turn].train(steps).cpu_s
    on, off = comm.sum(blocks).unbind(1)
    return on.tolist(), off.tolist()

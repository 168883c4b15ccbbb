"""Measure the cost of collecting events: the same workload with and without them, in turn, on the same data.

The cost is CPU time of all threads: wall time on a busy machine depends more on other programs. The resource sampler
runs during both, so its cost is not included; it is measured separately.
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
from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.measure.capacity import available_memory_bytes, memory_limits
from paceline.measure.memory import peak_bytes
from paceline.records import RunFolder
from paceline.records.examination import MeasuringCost
from paceline.records.timeline import sampled_steps
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create
from paceline.training.compiled import check_can_compile, compile_in_place
from paceline.training.loop import TrainingLoop
from paceline.training.rank_setup import RankSetup, set_up_rank
from paceline.training.recording.recording import Recording
from paceline.training.run import optimizer_factory
from paceline.training.sync import Sync
from paceline.workloads.batches import MicroBatch
from paceline.workloads.tickets import ONE_SHOT_HINT

BUDGET_S = 5.0
BLOCK_S = 0.05
"""Length of a block: long enough for the clock, and short enough for equal conditions with and without events."""
MIN_PAIRS = 6
MAX_BUDGETS = 4
"""Workloads whose steps are so long that `MIN_PAIRS` would take more than this many budgets are not measured: the cost
of events in such long steps is too small to measure."""


def measure_cost(
    config: RunConfig,
    world: World,
    *,
    threads: int | None,
    number: int = 0,
    budget_s: float = BUDGET_S,
    precision_file: Path | None = None,
) -> MeasuringCost | None:
    """Measure the cost of events; called on all ranks, after a run of the same workload.

    Return None on idle ranks, and on all ranks if the cost cannot be measured.
    """
    if Role.SERVER in create(config.strategy).roles(world.size):  # A rank cannot serve two trainings at once.
        return None
    has_memory = torch.tensor(int(_has_memory(world.local_size)))
    dist.all_reduce(has_memory, dist.ReduceOp.MIN)
    if not has_memory:
        return None
    setups = [
        set_up_rank(replace(config, events=events), world, threads, timed=True, precision_file=precision_file)
        for events in (True, False)
    ]
    done = f"cost-{number}"
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, ExitStack() as stack:
        sides = [
            stack.enter_context(TimedTraining(setup, Path(folder) / name))
            for setup, name in zip(setups, ("with", "without"), strict=True)
            if setup is not None
        ]
        if not sides:
            world.wait_for(done)
            return None
        found = _compare(sides[0], sides[1], budget_s)
        if sides[0].comm.rank == 0:
            world.announce(done)
    return found


def _has_memory(local_ranks: int) -> bool:
    """Whether every rank of the host has memory for two trainings at once, judged by the peak of the last run."""
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
    """Training of the workload on one rank, with or without events, a few steps at a time."""

    def __init__(self, setup: RankSetup, folder: Path) -> None:
        config, workload, self.comm = setup.config, setup.workload, setup.comm
        self.name = workload.name
        self.strategy = config.strategy
        self._source = setup.source()
        self.can_start_again = self._source.peek(1) is not None
        """False for data that can be iterated only once: two trainings cannot share it."""
        self._recording = Recording(config, self.comm, RunFolder.create(folder))
        make_optimizer = optimizer_factory(workload, self._source.batch)
        if config.compile:
            check_can_compile(self.comm.device.type)
            compile_in_place(setup.model)
        self._sync = Sync(setup.model, make_optimizer, setup.strategy, self.comm, config.bn)
        self._recording.start(self._sync, steps_only=True)
        self._loop = TrainingLoop(config, workload, self._sync, self._source, self._recording)
        self._loop.training_step.prepare()
        on_gpu = self.comm.device.type == "cuda"
        self.cycle = sampled_steps(self._sync.strategy.period).cycle if on_gpu else 1
        """Steps after which the pattern of recorded steps repeats. Blocks of whole cycles have the average cost."""
        self._first_step = self.cycle if on_gpu else 0
        self._epoch = -1
        self._batches: Iterator[list[MicroBatch]] = iter(())

    def train(self, steps: int) -> TimedSteps:
        """Train and record the given number of steps; the ranks start together."""
        stopwatch = self._recording.stopwatch
        stopwatch.next_step = self._first_step  # A long run records fewer steps, which would hide the cost.
        self.comm.control.barrier()
        before_s, cpu_before_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._train_step()
        self._sync.strategy.finish()
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
            stopwatch.clock.anchor()
        self._recording.step_recorder.flush()
        timed = TimedSteps(time.process_time() - cpu_before_s, time.perf_counter() - before_s)
        self._loop.training_step.between_windows()  # Decides about CUDA graphs.
        return timed

    def _train_step(self) -> None:
        if self._loop.train_step(self._epoch, self._batches):
            return
        self._epoch += 1
        self._batches = self._source.epoch(self._epoch)
        if not self._loop.train_step(self._epoch, self._batches):
            raise WorkloadError(f"the training data has no batch in epoch {self._epoch + 1}.", hint=ONE_SHOT_HINT)

    def __enter__(self) -> TimedTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self._recording.close()
        if error[0] is None:
            self._sync.close()


@dataclass(frozen=True)
class TimedSteps:
    """Time that some steps took on one rank."""

    cpu_s: float
    wall_s: float


def _compare(with_events: TimedTraining, without_events: TimedTraining, budget_s: float) -> MeasuringCost | None:
    """Train with and without events in turn; None if the data or the budget does not allow it."""
    comm = with_events.comm
    if not comm.control.smallest(with_events.can_start_again):
        return None
    for side in (with_events, without_events):
        side.train(WARM_UP_STEPS)
    step_s = comm.control.largest(without_events.train(WARM_UP_STEPS).wall_s / WARM_UP_STEPS)
    cycles = max(1, round(BLOCK_S / (step_s * with_events.cycle)))
    steps = cycles * with_events.cycle
    pair_s = 2 * steps * step_s
    if MIN_PAIRS * pair_s > MAX_BUDGETS * budget_s:
        return None
    pairs = max(MIN_PAIRS, round(budget_s / pair_s))
    on, off = _cpu_of_pairs(with_events, without_events, steps, pairs, comm)
    share = overhead_share(on, off)
    assert share is not None
    assert share.low is not None
    assert share.high is not None
    step_cpu_s = sorted(off)[pairs // 2] / steps / comm.world_size
    return MeasuringCost(
        workload=with_events.name,
        strategy=with_events.strategy,
        share=share.value,
        low=share.low,
        high=share.high,
        pairs=pairs,
        steps=steps,
        step_cpu_s=step_cpu_s,
    )


def _cpu_of_pairs(
    with_events: TimedTraining, without_events: TimedTraining, steps: int, pairs: int, comm: Comm
) -> tuple[list[float], list[float]]:
    """Return the CPU time of each block, summed over the ranks; the order ABBA cancels slow changes."""
    sides, blocks = (with_events, without_events), torch.empty(pairs, 2, dtype=torch.float64)
    for pair in range(pairs):
        for turn in (0, 1) if pair % 2 == 0 else (1, 0):
            blocks[pair, turn] = sides[turn].train(steps).cpu_s
    on, off = comm.control.sum(blocks).unbind(1)
    return on.tolist(), off.tolist()

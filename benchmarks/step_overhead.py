"""Measure Paceline's overhead per step: its `ddp` against hand-written DDP, Hugging Face Accelerate, Lightning Fabric.

Two ranks start once and train every candidate in blocks of steps, in rotated order. A ratio compares blocks of the same
round. Paceline's side is `paceline.training.run.run` itself, including records and reports. Its loop runs the process;
the other candidates train when it reports the end of a block. CPU time is that of all threads of the ranks.

CPU time per step ÷ that of hand-written DDP, median (95% interval). Conditions: 2 ranks × 16 images, one thread each, 2
cores of an AMD EPYC, torch 2.13, Accelerate 1.15, Fabric 2.6. The hand-written loop against itself shows the noise:

                      cnn, 100 rounds × 100 steps     vgg11, 30 rounds × 5 steps
    hand-written          4.03 ms                         229 ms
    Paceline          1.040 (1.028–1.053)             1.003 (0.942–1.025)
    itself, again     0.994 (0.976–1.005)             0.985 (0.953–1.016)
    Accelerate        1.066 (1.056–1.081)             0.989 (0.972–1.031)
    Fabric            1.020 (1.010–1.037)             0.995 (0.972–1.006)

    python benchmarks/step_overhead.py [--model cnn] [--rounds 100] [--steps 100] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from free_port import free_port
from paired import Ratio, ratio, write_results
from peers import HAND_WRITTEN, Task, Train, make_peers, missing_peers
from rich.console import Console
from rich.table import Table

from paceline.comm.network import LOOPBACK
from paceline.comm.world import join_world, leave_world
from paceline.config import RunConfig
from paceline.records import RunFolder
from paceline.records.events import EpochEvent, LogEvent, RunEvent, StartEvent
from paceline.training.recording import windows
from paceline.training.run import run
from paceline.workloads import data
from paceline.workloads.recipes import choose_recipe, with_recipe

PACELINE = "Paceline ddp"
RANKS = 2
BATCH_PER_RANK = 16
EPOCH_SAMPLES = 10_000
WARM_UP_ROUNDS = 1
CPU_LIMIT = 1.02
SAME_LOSS = 1e-3


@dataclass(frozen=True)
class Plan:
    """Model, and number of rounds and steps of a measurement."""

    model: str
    rounds: int
    steps: int
    """Steps per block."""

    def run_config(self) -> RunConfig:
        """Return the configuration of Paceline's run. An epoch consists of whole blocks."""
        samples_per_block = RANKS * BATCH_PER_RANK * self.steps
        blocks_per_epoch = -(-EPOCH_SAMPLES // samples_per_block)
        return RunConfig(
            workload=self.model,
            recipe="classic",
            data=f"synthetic:size={samples_per_block * blocks_per_epoch}",
            strategy="ddp",
            batch_per_rank=BATCH_PER_RANK,
            steps=(WARM_UP_ROUNDS + self.rounds) * self.steps,
            lr=0.01,
            device="cpu",
            log_every=self.steps,
            evaluate=False,
        )


DEFAULTS = {"cnn": Plan("cnn", rounds=100, steps=100), "vgg11": Plan("vgg11", rounds=40, steps=5)}


@dataclass(frozen=True)
class Block:
    """Steps of one candidate in one round, on one rank."""

    round: int
    candidate: str
    wall_s: float
    cpu_s: float
    losses: Sequence[float | None]
    """Loss of each step."""


class BlockSchedule:
    """Order of the candidates' blocks. Paceline's loop calls `on_event`, which trains the peers between its blocks."""

    def __init__(self, plan: Plan, peers: dict[str, Train]) -> None:
        self._plan = plan
        self._peers = peers
        self._order = self._rotated()
        self._barrier_group = dist.new_group(backend="gloo")
        self._round, self._started = 0, (0.0, 0.0)
        self.blocks: list[Block] = []

    def _rotated(self) -> Iterator[tuple[int, str]]:
        candidates = [PACELINE, *self._peers]
        for number in range(WARM_UP_ROUNDS + self._plan.rounds):
            first = number % len(candidates)
            for candidate in candidates[first:] + candidates[:first]:
                yield number, candidate

    def on_event(self, event: RunEvent) -> None:
        """Handle an event of Paceline's loop."""
        if isinstance(event, LogEvent):
            self._stop(PACELINE, event.losses)
            self._train_peers()
        elif isinstance(event, StartEvent):
            self._train_peers()
        elif isinstance(event, EpochEvent):  # Work done once per epoch is not part of a step.
            self._start()

    def _train_peers(self) -> None:
        for number, candidate in self._order:
            self._round = number
            if candidate == PACELINE:
                self._start()
                return
            self._start()
            losses = self._peers[candidate](self._plan.steps)
            self._stop(candidate, losses)

    def _start(self) -> None:
        dist.barrier(self._barrier_group)
        self._started = time.perf_counter(), time.process_time()

    def _stop(self, candidate: str, losses: Sequence[float | None]) -> None:
        wall_s, cpu_s = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        steps = self._plan.steps
        self.blocks.append(Block(self._round, candidate, wall_s / steps, cpu_s / steps, losses))


def train_all(rank: int, plan: Plan, port: int, folder: Path) -> None:
    """Run one rank's process: train all candidates in rotated order and write the times."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    config = plan.run_config()
    world = join_world(timeout_s=config.timeout_s)
    train, _ = data.load(config.data, data_dir=data.default_data_dir())
    with (folder / f"peers-{rank}.log").open("w") as log:
        with_values = with_recipe(config, choose_recipe(config))  # The peers take momentum and weight decay from it.
        schedule = BlockSchedule(plan, make_peers(Task(with_values, train, rank, RANKS, log)))

        # A window of the loop is a block: the first is as long as the others, and none grows beyond it.
        with patch.multiple(windows, WINDOW_S=0, WARM_UP_STEPS=plan.steps):
            run(config, world, RunFolder(folder), threads=1, on_event=schedule.on_event)
    assert torch.get_num_threads() == 1
    gathered: list[list[Block]] = [[] for _ in range(RANKS)]
    dist.gather_object(schedule.blocks, gathered if rank == 0 else None)
    if rank == 0:
        blocks = [[asdict(block) for block in blocks] for blocks in gathered]
        (folder / "blocks.json").write_text(json.dumps(blocks))
    leave_world()
    os._exit(0)  # Destructors of C++ libraries may abort at exit; all results are written by now.


@dataclass(frozen=True)
class Result:
    """Times of a candidate per round, over all ranks."""

    wall_s: list[float]
    """Wall time per step of the slowest rank."""
    cpu_s: list[float]
    """CPU time per step, mean over ranks."""
    first_losses: list[float]
    """Losses of the steps of the first block."""


def measure(plan: Plan) -> dict[str, Result]:
    """Start the ranks, train all candidates and return their times per step, without the warm-up."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = RunFolder.create(Path(name) / "run").path
        mp.spawn(train_all, (plan, free_port(), folder), nprocs=RANKS)  # type: ignore[no-untyped-call]
        ranks = json.loads((folder / "blocks.json").read_text())
    results: dict[str, Result] = defaultdict(lambda: Result([], [], []))
    for same_block in zip(*([Block(**block) for block in blocks] for blocks in ranks), strict=True):
        result = results[same_block[0].candidate]
        if same_block[0].round == 0:
            by_step = zip(*(block.losses for block in same_block), strict=True)
            result.first_losses.extend(statistics.mean(losses) for losses in by_step)
        if same_block[0].round >= WARM_UP_ROUNDS:
            result.wall_s.append(max(block.wall_s for block in same_block))
            result.cpu_s.append(statistics.mean(block.cpu_s for block in same_block))
    _check_same_training(results)
    return dict(results)


def _check_same_training(results: dict[str, Result]) -> None:
    """Raise `AssertionError` if the first two losses of a candidate differ by more than rounding.

    All candidates have the same weights, samples and first update. Later losses may differ: vgg11 amplifies different
    rounding of the normalised pixels to 2% by its fifth step. If the same code normalises the pixels, all losses are
    equal to the last digit printed.
    """
    for name, result in results.items():
        for found, expected in zip(result.first_losses[:2], results[HAND_WRITTEN].first_losses[:2], strict=True):
            if abs(found / expected - 1) > SAME_LOSS:
                raise AssertionError(f"{name} does not train the same task: loss {found}, expected {expected}")


@dataclass(frozen=True)
class Row:
    """One candidate in the table."""

    candidate: str
    wall_ms: float
    cpu_ms: float
    wall: Ratio
    """Ratio to the hand-written loop."""
    cpu: Ratio
    """Ratio to the hand-written loop."""


def compare(results: dict[str, Result]) -> list[Row]:
    """Return the rows of the table, the hand-written loop first."""
    base = results[HAND_WRITTEN]
    names = [HAND_WRITTEN, *(name for name in results if name != HAND_WRITTEN)]
    return [
        Row(
            name,
            statistics.median(results[name].wall_s) * 1e3,
            statistics.median(results[name].cpu_s) * 1e3,
            ratio(results[name].wall_s, base.wall_s),
            ratio(results[name].cpu_s, base.cpu_s),
        )
        for name in names
    ]


def show(plan: Plan, rows: list[Row], console: Console) -> None:
    """Print the table and the verdict."""
    conditions = (
        f"{plan.model}, synthetic 3×32×32, {RANKS} ranks × {BATCH_PER_RANK}, 1 thread each, Gloo on loopback, "
        f"{plan.rounds} rounds × {plan.steps} steps; medians of time per step; ratios with 95% intervals"
    )
    table = Table("candidate", title=conditions, title_justify="left")
    for heading in ("CPU ms", "CPU ÷ hand-written", "wall ms", "wall ÷ hand-written"):
        table.add_column(heading, justify="right")
    for row in rows:
        base = row.candidate == HAND_WRITTEN
        cpu, wall = ("1", "1") if base else (str(row.cpu), str(row.wall))
        table.add_row(row.candidate, f"{row.cpu_ms:.3f}", cpu, f"{row.wall_ms:.3f}", wall)
    console.print(table)
    for name in missing_peers():
        console.print(f"{name} is not installed; `make bench` installs it.")
    (own,) = [row for row in rows if row.candidate == PACELINE]
    verdict = {True: "yes", False: "no", None: "unclear; use more --rounds"}[own.cpu.within(CPU_LIMIT)]
    console.print(f"Paceline within {CPU_LIMIT - 1:.0%} of hand-written DDP in CPU time per step: {verdict}.\n")


def main() -> None:
    """Measure and print: the table to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=DEFAULTS, action="append", help="model to train; may be repeated [default: all]"
    )
    parser.add_argument("--rounds", type=int, help="number of rounds [default: 100 for cnn, 40 for vgg11]")
    parser.add_argument("--steps", type=int, help="steps per block [default: 100 for cnn, 5 for vgg11]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--quick", action="store_true", help="measure a few rounds, to check that it works")
    options = parser.parse_args()
    console, found = Console(width=None if sys.stdout.isatty() else 140), []
    for model in options.model or DEFAULTS:
        usual = DEFAULTS[model]
        rounds = options.rounds or (6 if options.quick else usual.rounds)
        plan = Plan(model, rounds, options.steps or (5 if options.quick else usual.steps))
        print(f"{model}: {rounds} rounds …", file=sys.stderr)
        results = measure(plan)
        rows = compare(results)
        show(plan, rows, console)
        figures = {name: asdict(result) for name, result in results.items()}
        found.append({"plan": asdict(plan), "rows": [asdict(row) for row in rows], "rounds": figures})
    if options.json:
        write_results(options.json, {"models": found})


if __name__ == "__main__":
    main()

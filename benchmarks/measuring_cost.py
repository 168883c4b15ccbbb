"""Measure the CPU time that collecting events adds to a step.

Two ranks start once and train three copies of the workload, in blocks of a few steps, in rotated order: with events,
without, and without again, which shows the noise. A ratio compares blocks of the same round. CPU time is that of all
threads of the ranks, including writing the record.

CPU time per step ÷ CPU time without events, median (95% interval). Conditions: `ddp`, 2 ranks × 16 images, one thread
each, 2 otherwise idle cores of an AMD EPYC, torch 2.13:

                      cnn, 500 rounds × 20 steps      vgg11, 120 rounds × 2 steps
    without               4.48 ms                         229 ms
    with events       1.021 (1.012–1.030)             1.001 (0.995–1.008)
    without, again    1.008 (0.997–1.021)             0.995 (0.989–1.001)

    python benchmarks/measuring_cost.py [--model cnn] [--strategy ddp] [--rounds 500] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from free_port import free_port
from paired import Ratio, ratio, write_results
from rich.console import Console
from rich.table import Table

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.comm.network import LOOPBACK
from paceline.comm.world import join_world, leave_world
from paceline.config import RunConfig
from paceline.doctor.measuring_cost import TimedTraining
from paceline.training.rank_setup import set_up_rank

RANKS = 2
BATCH_PER_RANK = 16
WITH, WITHOUT, AGAIN = "with events", "without", "without, again"
SIDES = {WITH: True, WITHOUT: False, AGAIN: False}
LIMITS = {"cnn": 1.03, "vgg11": 1.01}


@dataclass(frozen=True)
class Plan:
    """Model, strategy, and number of rounds and steps of a measurement."""

    model: str
    strategy: str
    rounds: int
    steps: int
    """Steps per block."""

    def run_config(self) -> RunConfig:
        """Return the configuration of the training."""
        return RunConfig(
            workload=self.model,
            data="synthetic:size=10000",
            strategy=self.strategy,
            batch_per_rank=BATCH_PER_RANK,
            lr=0.01,
            device="cpu",
        )


DEFAULTS = {"cnn": Plan("cnn", "ddp", rounds=500, steps=20), "vgg11": Plan("vgg11", "ddp", rounds=120, steps=2)}


def train_all(rank: int, plan: Plan, port: int, results: Path) -> None:
    """Run one rank's process: train all sides in rotated order and write the times."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    config, names = plan.run_config(), list(SIDES)
    world = join_world(timeout_s=config.timeout_s)
    blocks = torch.empty(plan.rounds, len(names), 2, dtype=torch.float64)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, ExitStack() as stack:
        sides = []
        for number, events in enumerate(SIDES.values()):
            setup = set_up_rank(replace(config, events=events), world, 1, timed=True)
            assert setup is not None
            sides.append(stack.enter_context(TimedTraining(setup, Path(folder) / str(number))))
        for side in sides:
            side.train(2 * WARM_UP_STEPS)
        for number in range(plan.rounds):
            first = number % len(sides)
            for turn in [*range(first, len(sides)), *range(first)]:
                block = sides[turn].train(plan.steps)
                blocks[number, turn] = torch.tensor([block.cpu_s, block.wall_s], dtype=torch.float64) / plan.steps
        dist.all_reduce(blocks)
    if rank == 0:
        results.write_text(json.dumps((blocks / RANKS).tolist()))
    leave_world()
    os._exit(0)  # Destructors of C++ libraries may abort at exit; all results are written by now.


@dataclass(frozen=True)
class Row:
    """Times per step with or without events, and their ratios to those without."""

    side: str
    cpu_ms: float
    wall_ms: float
    cpu: Ratio
    wall: Ratio


def measure(plan: Plan) -> list[Row]:
    """Start the ranks, train all sides and return the table."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        results = Path(name) / "blocks.json"
        mp.spawn(train_all, (plan, free_port(), results), nprocs=RANKS)  # type: ignore[no-untyped-call]
        rounds = json.loads(results.read_text())
    cpu, wall = ([[side[figure] for side in sides] for sides in rounds] for figure in (0, 1))
    base = list(SIDES).index(WITHOUT)
    return [
        Row(
            name,
            statistics.median(row[number] for row in cpu) * 1e3,
            statistics.median(row[number] for row in wall) * 1e3,
            *(ratio([row[number] for row in figures], [row[base] for row in figures]) for figures in (cpu, wall)),
        )
        for number, name in enumerate(SIDES)
    ]


def show(plan: Plan, rows: list[Row], console: Console) -> None:
    """Print the table and the verdict."""
    conditions = (
        f"{plan.model}, {plan.strategy}, synthetic 3×32×32, {RANKS} ranks × {BATCH_PER_RANK}, 1 thread each, Gloo on "
        f"loopback, {plan.rounds} rounds × {plan.steps} steps; medians of time per step; ratios with 95% intervals"
    )
    table = Table("side", title=conditions, title_justify="left")
    for heading in ("CPU ms", "CPU ÷ without", "wall ms", "wall ÷ without"):
        table.add_column(heading, justify="right")
    for row in rows:
        cpu, wall = ("1", "1") if row.side == WITHOUT else (str(row.cpu), str(row.wall))
        table.add_row(row.side, f"{row.cpu_ms:.3f}", cpu, f"{row.wall_ms:.3f}", wall)
    console.print(table)
    limit = LIMITS[plan.model]
    (own,) = [row for row in rows if row.side == WITH]
    verdict = {True: "yes", False: "no", None: "unclear; use more --rounds"}[own.cpu.within(limit)]
    console.print(f"Events within {limit - 1:.0%} of the CPU time of a step: {verdict}.\n")


def main() -> None:
    """Measure and print: the table to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=DEFAULTS, action="append", help="model to train; may be repeated [default: all]"
    )
    parser.add_argument("--strategy", default="ddp", help="strategy to train with [default: ddp]")
    parser.add_argument("--rounds", type=int, help="number of rounds [default: 500 for cnn, 120 for vgg11]")
    parser.add_argument("--steps", type=int, help="steps per block [default: 20 for cnn, 2 for vgg11]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--quick", action="store_true", help="measure a few rounds, to check that it works")
    options = parser.parse_args()
    console, found = Console(width=None if sys.stdout.isatty() else 140), []
    for model in options.model or DEFAULTS:
        usual = DEFAULTS[model]
        rounds = options.rounds or (6 if options.quick else usual.rounds)
        plan = Plan(model, options.strategy, rounds, options.steps or (2 if options.quick else usual.steps))
        print(f"{model}: {rounds} rounds …", file=sys.stderr)
        rows = measure(plan)
        show(plan, rows, console)
        found.append({"plan": asdict(plan), "rows": [asdict(row) for row in rows]})
    if options.json:
        write_results(options.json, {"models": found})


if __name__ == "__main__":
    main()

"""What collecting events costs a step: the same training with it and without it, in processor time.

Two ranks start once and train the workload three times over, in blocks of some steps, in rotated order: with events,
without, and without once more, which shows the noise. A ratio compares blocks of one round. CPU time is the ranks'
processor time, all threads, with the writing of the record.

CPU time per step to that without events: median (95% interval); `ddp`, 2 ranks × 16 images, one thread each, on 2 quiet
cores of an AMD EPYC, torch 2.13:

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
from paired import Ratio, ratio
from rich.console import Console
from rich.table import Table

from paceline.comm.network import LOOPBACK, free_port
from paceline.comm.world import join_world, leave_world
from paceline.config import RunConfig
from paceline.doctor.measuring_cost import WARM_UP_STEPS, TimedTraining
from paceline.records import provenance
from paceline.training.rank_setup import set_up_rank

RANKS = 2
BATCH_PER_RANK = 16
WITH, WITHOUT, AGAIN = "with events", "without", "without, again"
SIDES = {WITH: True, WITHOUT: False, AGAIN: False}
LIMITS = {"cnn": 1.03, "vgg11": 1.01}


@dataclass(frozen=True)
class Plan:
    """How much of what is run."""

    model: str
    strategy: str
    rounds: int
    steps: int
    """Of one block."""

    def run_config(self) -> RunConfig:
        """What is trained."""
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
    """One rank's process: all sides, in turn."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    config, names = plan.run_config(), list(SIDES)
    world = join_world(timeout_s=config.timeout)
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
    os._exit(0)  # Destructors of C++ libraries may fail at exit; everything is written.


@dataclass(frozen=True)
class Row:
    """A side's figures per step, and their ratios to those without events."""

    side: str
    cpu_ms: float
    wall_ms: float
    cpu: Ratio
    wall: Ratio


def measure(plan: Plan) -> list[Row]:
    """Runs all sides; the table."""
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
    """Prints the table and the verdict."""
    conditions = (
        f"{plan.model}, {plan.strategy}, synthetic 3×32×32, {RANKS} ranks × {BATCH_PER_RANK}, 1 thread each, Gloo on "
        f"loopback, {plan.rounds} rounds × {plan.steps} steps; medians of time per step; ratios with 95% intervals"
    )
    table = Table("side", title=conditions, title_justify="left")
    for heading in ("CPU ms", "CPU, to without", "wall ms", "wall, to without"):
        table.add_column(heading, justify="right")
    for row in rows:
        cpu, wall = ("1", "1") if row.side == WITHOUT else (str(row.cpu), str(row.wall))
        table.add_row(row.side, f"{row.cpu_ms:.3f}", cpu, f"{row.wall_ms:.3f}", wall)
    console.print(table)
    limit = LIMITS[plan.model]
    (own,) = [row for row in rows if row.side == WITH]
    verdict = {True: "yes", False: "no", None: "not clear, more --rounds would tell"}[own.cpu.within(limit)]
    console.print(f"Events within {limit - 1:.0%} of the CPU time of a step: {verdict}.\n")


def main() -> None:
    """Measures and prints; the table on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=DEFAULTS, action="append", help="one model; may be repeated [default: all]")
    parser.add_argument("--strategy", default="ddp", help="how ranks agree [default: ddp]")
    parser.add_argument("--rounds", type=int, help="rounds of all sides [default: 500 for cnn, 120 for vgg11]")
    parser.add_argument("--steps", type=int, help="steps of a block [default: 20 for cnn, 2 for vgg11]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
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
        options.json.write_text(json.dumps({"provenance": provenance(), "models": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

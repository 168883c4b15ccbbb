"""Measure the step rate on a CPU as a share of the rate of matrix products, in fp32 and in bf16 with channels-last.

One process trains on one thread. In each round it measures matrix products of 1024 × 1024, a block of steps of
Paceline's loop and a block of a hand-written loop, at the same batch size, in both number formats. The FLOP of a
step are those that Paceline counts (forward × 3). The share is their rate ÷ that of the products of the same round and
number format. A ratio compares blocks of the same round.

    python benchmarks/cpu_step.py [--model cnn] [--batch 64] [--rounds 8] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from free_port import free_port
from paired import Ratio, ratio, write_results
from rich.console import Console
from rich.table import Table

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.comm import World
from paceline.comm.network import LOOPBACK
from paceline.comm.world import join_world
from paceline.config import Precision, RunConfig
from paceline.doctor.measuring_cost import TimedTraining
from paceline.measure.matrix_product import FLOP, fastest_products_s
from paceline.training.checks.model import check_model
from paceline.training.precision import autocast
from paceline.training.rank_setup import RankSetup, set_up_rank
from paceline.workloads.load import load_workload

BATCHES = {"cnn": (32, 256), "vgg11": (16, 64), "resnet18": (16, 64)}
FORMATS: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS_S = 0.2
BLOCK_S = 0.5
"""Least length of a block of steps."""


@dataclass(frozen=True)
class Row:
    """One model at one batch in one number format."""

    model: str
    batch: int
    precision: str
    step_ms: float
    gflop_per_s: float
    share: float
    """Rate of a step ÷ that of matrix products, median over rounds."""
    to_hand_written: Ratio
    """Wall time of Paceline's step ÷ that of the hand-written loop."""


def set_up(model: str, batch: int, precision: Precision, world: World) -> RankSetup:
    """Return Paceline's side: one rank on one thread, on images of random pixels, without augmentation."""
    config = RunConfig(
        workload=model,
        recipe="classic",
        data=f"synthetic:size={8 * batch}",
        strategy="single",
        batch=batch,
        precision=precision,
        channels_last=precision == "bf16",
        device="cpu",
        augment=False,
        replica_guard="off",
    )
    setup = set_up_rank(config, world, 1, timed=True)
    assert setup is not None
    return setup


class HandWritten:
    """The same model in a loop of a few lines."""

    def __init__(self, setup: RankSetup) -> None:
        layout = torch.channels_last if setup.config.channels_last else torch.contiguous_format
        workload = load_workload(setup.given)
        self._model = workload.model.to(memory_format=layout).train()  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self._precision = setup.config.precision
        images, self._labels = setup.source().peek(setup.config.global_batch(1))
        self._images = images.to(memory_format=layout)

    def train(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        began_s = time.perf_counter()
        for _ in range(steps):
            with autocast(self._precision, torch.device("cpu")):
                loss = F.cross_entropy(self._model(self._images), self._labels)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - began_s


def measure(model: str, batch: int, rounds: int, world: World) -> list[Row]:
    """Return a row per number format; rounds interleave formats, loops and products."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, ExitStack() as stack:
        sides = []
        for precision, dtype in FORMATS.items():
            setup = set_up(model, batch, precision, world)
            flop = check_model(setup.model, setup.workload, setup.source(), setup.config, 0, count_flop=True)
            assert flop is not None
            own = stack.enter_context(TimedTraining(setup, Path(folder) / precision))
            other = HandWritten(setup)
            own.train(WARM_UP_STEPS)
            other.train(2)
            steps = max(1, round(BLOCK_S / (other.train(2) / 2)))
            sides.append((precision, dtype, flop * batch, own, other, steps, [], [], []))
        for number in range(rounds):
            for _, dtype, _, own, other, steps, own_s, other_s, products in sides[:: 1 if number % 2 else -1]:
                products.append(FLOP / fastest_products_s([dtype], PRODUCTS_S)[0])
                if number % 2:
                    own_s.append(own.train(steps).wall_s / steps)
                other_s.append(other.train(steps) / steps)
                if not number % 2:
                    own_s.append(own.train(steps).wall_s / steps)
        for precision, _, flop, _, _, _, own_s, other_s, products in sides:
            shares = [flop / seconds / rate for seconds, rate in zip(own_s, products, strict=True)]
            step_s = statistics.median(own_s)
            rows.append(
                Row(
                    model,
                    batch,
                    precision,
                    step_s * 1e3,
                    flop / step_s / 1e9,
                    statistics.median(shares),
                    ratio(own_s, other_s),
                )
            )
    return rows


def show(rows: list[Row], rounds: int, console: Console) -> None:
    """Print the table."""
    title = f"1 process, 1 thread, synthetic 3×32×32, {rounds} rounds; medians; ratios with 95% intervals"
    table = Table("model", title=title, title_justify="left")
    for heading in ("batch", "format", "ms per step", "GFLOP/s", "share of products", "wall ÷ hand-written"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (f"{row.step_ms:.2f}", f"{row.gflop_per_s:.1f}", f"{row.share:.0%}", str(row.to_hand_written))
        table.add_row(row.model, str(row.batch), row.precision, *figures)
    console.print(table)


def main() -> None:
    """Measure and print: the table to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=BATCHES, action="append", help="model; may be repeated [default: all]")
    parser.add_argument("--batch", type=int, action="append", help="batch; may be repeated [default: two per model]")
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds [default: 8]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--quick", action="store_true", help="measure one round, to check that it works")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    world, rounds = join_world(timeout_s=120), 1 if options.quick else options.rounds
    rows: list[Row] = []
    for model in options.model or BATCHES:
        for batch in options.batch or BATCHES[model]:
            print(f"{model}, batch {batch}: {rounds} rounds …", file=sys.stderr)
            rows += measure(model, batch, rounds, world)
    show(rows, rounds, Console(width=None if sys.stdout.isatty() else 140))
    if options.json:
        write_results(options.json, {"rounds": rounds, "rows": [asdict(row) for row in rows]})
    sys.stdout.flush()
    os._exit(0)  # Destructors of C++ libraries may abort at exit; all results are written by now.


if __name__ == "__main__":
    main()

"""Measure seconds per epoch on a GPU: Paceline's step with and without CUDA graphs, beside hand-written loops.

One process trains ResNet-18 on 50,000 synthetic images of 3×32×32, in bf16 with channels-last memory. Data and
augmentation are included in all times. The hand-written loops (hand_written.py) have a data path of their own, of a few
lines: one is eager, the other has its whole step captured as one CUDA graph. They compute the same loss, with label
smoothing. Blocks of all candidates alternate; a ratio compares blocks of the same round.

With `--host`, the host time of Paceline's eager step is compared with that of the hand-written eager loop, by operation
and by function (host_time.py).

    python benchmarks/gpu.py [--batch 32 …] [--compile] [--kernels 2048] [--host 32] [--rounds 8] [--json FILE]
        [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from free_port import free_port
from gpu_kernels import KernelTime, kernel_times, show_kernels
from hand_written import HandWritten
from host_time import HostTime, function_times, operation_times, show_host
from paired import Ratio, ratio, write_results
from rich.console import Console
from rich.table import Table

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.comm import World
from paceline.comm.network import LOOPBACK
from paceline.comm.world import join_world
from paceline.config import RunConfig
from paceline.doctor.measuring_cost import TimedTraining
from paceline.training.checks.model import check_model
from paceline.training.rank_setup import RankSetup, set_up_rank
from paceline.workloads import data
from paceline.workloads.load import load_workload

IMAGES = 50_000
BATCHES = (32, 128, 512, 2048)
BLOCK_S = 0.5
"""Least length of a block of steps."""
EAGER, BARE_GRAPH = "hand-written eager", "hand-written bare graph"
OURS, WITHOUT_EVENTS = "Paceline eager", "Paceline eager without events"
SETTINGS: dict[str, dict[str, Any]] = {
    OURS: {"cuda_graph": "off"},
    WITHOUT_EVENTS: {"cuda_graph": "off", "events": False},
    "Paceline": {"cuda_graph": "on"},
    "Paceline --compile": {"cuda_graph": "on", "compile": True},
}
"""Settings of Paceline's candidates, by name."""


class Candidate(Protocol):
    """Training whose steps are timed."""

    def train(self, steps: int) -> float:
        """Train some steps; return the seconds that they took."""


@dataclass(frozen=True)
class Row:
    """One candidate at one batch."""

    batch: int
    candidate: str
    step_ms: float
    epoch_s: float
    tflop_per_s: float
    ready_s: float
    """Seconds from the creation of the candidate until its first timed step: compilation, trial of graphs."""
    to_eager: Ratio
    """Time ÷ that of the hand-written loop in the same round."""
    to_bare_graph: Ratio | None
    """Time ÷ that of the bare graph; None where there is none."""


def set_up(batch: int, world: World, device: str, **settings: Any) -> RankSetup:
    """Return one rank with its model and data."""
    config = RunConfig(
        workload="resnet18" if device == "cuda" else "cnn",
        recipe="sgd" if device == "cuda" else "classic",
        data=f"synthetic:size={IMAGES if device == 'cuda' else 4 * batch}",
        strategy="single",
        batch=batch,
        precision="bf16",
        channels_last=True,
        device=device,
        replica_guard="off",
        **settings,
    )
    setup = set_up_rank(config, world, None, timed=True)
    assert setup is not None
    return setup


class Paceline:
    """Paceline's own loop."""

    def __init__(self, setup: RankSetup, folder: Path, stack: ExitStack) -> None:
        self._training = stack.enter_context(TimedTraining(setup, folder))

    def train(self, steps: int) -> float:
        return self._training.train(steps).wall_s


def hand_written(setup: RankSetup, *, graph: bool) -> HandWritten:
    """Return a hand-written loop that trains the same model on the same images."""
    model, train = (
        load_workload(setup.given).model,
        data.load(setup.config.data, data_dir=data.data_dir(setup.config.data_dir))[0],
    )
    normal, labels = train.batch(torch.arange(len(train)), seed=0, epoch=None)
    batch = setup.source().batch
    assert batch is not None
    smoothing = setup.workload.label_smoothing
    return HandWritten(model, normal, labels.to(setup.comm.device), batch, graph=graph, label_smoothing=smoothing)


def candidates(
    batch: int, world: World, device: str, names: Sequence[str], stack: ExitStack
) -> dict[str, tuple[Candidate, float]]:
    """Return each candidate, ready to be timed, with the seconds it took to get ready."""
    found: dict[str, tuple[Candidate, float]] = {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
    for number, name in enumerate(names):
        setup = set_up(batch, world, device, **SETTINGS.get(name, {}))
        began_s = time.perf_counter()
        candidate: Candidate
        if name in SETTINGS:
            candidate = Paceline(setup, folder / str(number), stack)
        else:
            candidate = hand_written(setup, graph=name == BARE_GRAPH)
        candidate.train(WARM_UP_STEPS)
        found[name] = candidate, time.perf_counter() - began_s
        candidate.train(WARM_UP_STEPS)
    return found


def measure(
    batch: int, rounds: int, world: World, device: str, names: Sequence[str], *, kernels: bool = False
) -> tuple[list[Row], list[KernelTime]]:
    """Return a row per candidate, and the kernels of a step of Paceline if asked for; rounds interleave candidates."""
    with ExitStack() as stack:
        found = candidates(batch, world, device, names, stack)
        setup = set_up(batch, world, device)
        flop = check_model(setup.model, setup.workload, setup.source(), setup.config, 0, count_flop=True) or 0
        steps = {
            name: max(1, round(BLOCK_S / (candidate.train(WARM_UP_STEPS) / WARM_UP_STEPS)))
            for name, (candidate, _) in found.items()
        }
        times: dict[str, list[float]] = {name: [] for name in found}
        for number in range(rounds):
            turn = list(found.items())
            shift = number % len(turn)
            for name, (candidate, _) in turn[shift:] + turn[:shift]:
                times[name].append(candidate.train(steps[name]) / steps[name])
        rows = []
        for name, (_, ready_s) in found.items():
            step_s = statistics.median(times[name])
            to_bare_graph = ratio(times[name], times[BARE_GRAPH]) if BARE_GRAPH in times else None
            rows.append(
                Row(
                    batch,
                    name,
                    step_s * 1e3,
                    step_s * IMAGES / batch,
                    flop * batch / step_s / 1e12,
                    ready_s,
                    ratio(times[name], times[EAGER]),
                    to_bare_graph,
                )
            )
        timed = kernel_times(found[names[-1]][0].train) if kernels else []
    if device == "cuda":
        torch.cuda.empty_cache()
    return rows, timed


def compare_host(batch: int, world: World, device: str) -> dict[str, list[HostTime]]:
    """Return the host time of a step of the hand-written eager loop and of Paceline's, by operation and by function."""
    with ExitStack() as stack:
        base, other = (
            candidate.train for candidate, _ in candidates(batch, world, device, [EAGER, OURS], stack).values()
        )
        return {"operation": operation_times(base, other), "function": function_times(base, other)}


def show(rows: Sequence[Row], rounds: int, console: Console) -> None:
    """Print the table."""
    title = f"ResNet-18, {IMAGES:,} images, bf16, channels-last, {rounds} rounds; medians; ratios with 95% intervals"
    table = Table("candidate", title=title, title_justify="left")
    headings = ("batch", "ms per step", "s per epoch", "TFLOP/s", "ready after s", "÷ eager", "÷ bare graph")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (f"{row.step_ms:.2f}", f"{row.epoch_s:.2f}", f"{row.tflop_per_s:.0f}", f"{row.ready_s:.1f}")
        table.add_row(row.candidate, str(row.batch), *figures, str(row.to_eager), str(row.to_bare_graph or ""))
    console.print(table)


def main() -> int | None:
    """Measure and print: tables to stdout, progress to stderr. Return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="batch sizes [default: 32 128 512 2048]")
    parser.add_argument("--compile", action="store_true", help="also measure --compile, which takes about a minute")
    parser.add_argument("--kernels", type=int, nargs="+", default=[], metavar="BATCH", help="show kernels of a step")
    parser.add_argument(
        "--host", type=int, nargs="+", default=[], metavar="BATCH", help="show host time of eager steps"
    )
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds [default: 8]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--quick", action="store_true", help="measure one round, to check that it works")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU that torch can use; on a CPU, run benchmarks/cpu_step.py.", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    world, rounds = join_world(timeout_s=120), 1 if options.quick else options.rounds
    console = Console(width=None if sys.stdout.isatty() else 140)
    plain = [EAGER, OURS, BARE_GRAPH, "Paceline"]
    rows: list[Row] = []
    kernels: dict[str, list[KernelTime]] = {}
    host: dict[str, list[HostTime]] = {}
    for batch in options.batch:
        print(f"batch {batch}: {rounds} rounds …", file=sys.stderr)
        names = [EAGER, WITHOUT_EVENTS, *plain[1:]] if batch in options.host else plain
        found, timed = measure(batch, rounds, world, "cuda", names, kernels=batch in options.kernels)
        rows += found
        if timed:
            kernels[str(batch)] = timed
            show_kernels(timed, f"Kernels of a step of Paceline at batch {batch}", console)
        if options.compile:
            print(f"batch {batch}, compiled: {rounds} rounds …", file=sys.stderr)
            names = [EAGER, BARE_GRAPH, "Paceline --compile"]
            found, timed = measure(batch, rounds, world, "cuda", names, kernels=batch in options.kernels)
            rows += found[-1:]
            if timed:
                kernels[f"{batch} compiled"] = timed
                show_kernels(timed, f"Kernels of a step of Paceline --compile at batch {batch}", console)
        if batch in options.host:
            for kind, times in compare_host(batch, world, "cuda").items():
                host[f"{batch} by {kind}"] = times
                show_host(times, f"Host time of a step of {OURS} at batch {batch}, by {kind}; base: {EAGER}", console)
        show(rows, rounds, console)
        if options.json:
            named = {name: [asdict(kernel) for kernel in timed] for name, timed in kernels.items()}
            host_named = {name: [asdict(time) for time in times] for name, times in host.items()}
            content = {"rounds": rounds, "rows": [asdict(row) for row in rows], "kernels": named, "host": host_named}
            write_results(options.json, content)
    sys.stdout.flush()
    os._exit(0)  # Destructors of C++ libraries may abort at exit; all results are written by now.


if __name__ == "__main__":
    sys.exit(main())

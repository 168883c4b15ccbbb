"""Compare Paceline's all-reduces with Gloo's, on one tensor and the ranks of one host.

Each round calls every candidate once. A ratio compares calls of the same round; times are those of the slowest rank.

Time ÷ time of Gloo's all_reduce, median (95% interval). Conditions: 32 MiB of float32, one thread per rank, segments of
2 MiB, 100 rounds, 2 otherwise idle cores of an AMD EPYC, torch 2.13. Four ranks have half a core each:

                        2 ranks                   4 ranks
    Gloo's all_reduce       22.8 ms                   61.2 ms
    ring                1.069 (1.022–1.131)       1.102 (1.083–1.142)
    halving_doubling    1.054 (0.999–1.086)       1.151 (1.117–1.171)

    python benchmarks/all_reduces.py [--ranks 2] [--mb 32] [--rounds 100] [--segment-kb 2048] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from free_port import free_port
from paired import Ratio, ratio, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.comm import Comm, close_comm, open_comm
from paceline.comm.all_reduce import Scratch, all_reduce
from paceline.comm.network import LOOPBACK
from paceline.comm.world import join_world, leave_world
from paceline.plans import halving_doubling, ring
from paceline.plans.cuts import SEGMENT_KB

GLOO = "Gloo's all_reduce"
LIMIT = 1.25
WARM_UP = 3


@dataclass(frozen=True)
class Plan:
    """Tensor, ranks and number of rounds of a measurement."""

    ranks: int
    mb: float
    rounds: int
    segment_kb: float


@dataclass(frozen=True)
class Row:
    """Time of a candidate, and its ratio to Gloo's time."""

    name: str
    ms: float
    to_gloo: Ratio


def candidates(comm: Comm, segment_kb: float) -> dict[str, Callable[[Tensor], object]]:
    """Return the all-reduces to compare, by name."""
    own = {"segment_kb": segment_kb, "scratch": Scratch()}
    return {
        GLOO: partial(dist.all_reduce, group=comm.group),
        "ring": partial(all_reduce, comm=comm, algorithm=ring.ALGORITHM, **own),
        "halving_doubling": partial(all_reduce, comm=comm, algorithm=halving_doubling.ALGORITHM, **own),
    }


def run_all(rank: int, plan: Plan, port: int, results: Path) -> None:
    """Run one rank's process: call all candidates in rotated order and write the times."""
    count = str(plan.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    join_world(timeout_s=60)
    comm = open_comm(range(plan.ranks), device=torch.device("cpu"), backend="gloo", timeout_s=60)
    assert comm is not None
    calls = list(candidates(comm, plan.segment_kb).values())
    tensor = torch.zeros(int(plan.mb * 2**20) // 4)
    times = torch.empty(WARM_UP + plan.rounds, len(calls), dtype=torch.float64)
    for number in range(len(times)):
        first = number % len(calls)
        for turn in [*range(first, len(calls)), *range(first)]:
            comm.control.barrier()
            began = time.perf_counter()
            calls[turn](tensor)
            times[number, turn] = time.perf_counter() - began
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        results.write_text(json.dumps(times[WARM_UP:].T.tolist()))
    close_comm(comm)
    leave_world()
    os._exit(0)  # Destructors of C++ libraries may abort at exit; all results are written by now.


def measure(plan: Plan) -> list[Row]:
    """Start the ranks, run all candidates and return the table."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        results = Path(name) / "times.json"
        mp.spawn(run_all, (plan, free_port(), results), nprocs=plan.ranks)  # type: ignore[no-untyped-call]
        times = json.loads(results.read_text())
    names = [GLOO, "ring", "halving_doubling"]
    return [
        Row(name, statistics.median(own) * 1e3, ratio(own, times[0])) for name, own in zip(names, times, strict=True)
    ]


def show(plan: Plan, rows: list[Row], console: Console) -> None:
    """Print the table and the verdicts."""
    conditions = (
        f"{plan.mb:g} MiB of float32, {plan.ranks} ranks × 1 thread on {os.cpu_count()} cores, loopback, segments of "
        f"{plan.segment_kb:g} KiB, {plan.rounds} rounds; medians, ratios with 95% intervals"
    )
    table = Table("all-reduce", title=conditions, title_justify="left")
    table.add_column("ms", justify="right")
    table.add_column("to Gloo's", justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.ms:.2f}", "1" if row.name == GLOO else str(row.to_gloo))
    console.print(table)
    for row in rows[1:]:
        verdict = {True: "yes", False: "no", None: "unclear; use more --rounds"}[row.to_gloo.within(LIMIT)]
        console.print(f"{row.name} within {LIMIT - 1:.0%} of Gloo's: {verdict}.")
    console.print()


def main() -> None:
    """Measure and print: the table to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="world size; may be repeated [default: 2 and 4]")
    parser.add_argument("--mb", type=float, default=32, help="size of the tensor in MiB [default: 32]")
    parser.add_argument("--rounds", type=int, help="number of rounds [default: 100]")
    parser.add_argument("--segment-kb", type=float, default=SEGMENT_KB, help="size of a message in KiB [default: 2048]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--quick", action="store_true", help="measure a few rounds, to check that it works")
    options = parser.parse_args()
    console, found = Console(width=None if sys.stdout.isatty() else 140), []
    for ranks in options.ranks or [2, 4]:
        plan = Plan(ranks, options.mb, options.rounds or (6 if options.quick else 100), options.segment_kb)
        print(f"{ranks} ranks: {plan.rounds} rounds …", file=sys.stderr)
        rows = measure(plan)
        show(plan, rows, console)
        found.append({"plan": asdict(plan), "rows": [asdict(row) for row in rows]})
    if options.json:
        write_results(options.json, {"sizes": found})


if __name__ == "__main__":
    main()

"""Break a run again and again, from a seed, and check that nothing is lost, trained twice or leaked.

Emulated hosts train a linear model that writes down which samples each rank trains. Ranks and hosts are killed and
stopped, links are cut, user code raises and sleeps, signals ask the run to stop. After each fault the run must make
progress again: by itself, by a restart, or when the command is started again. At the end:

- every sample of every step was trained once, and again only in steps that a restart announced;
- the losses are those of an undisturbed run;
- resident memory and descriptors of the launcher do not grow with the number of faults, and the memory of ranks does
  not grow while they train undisturbed;
- no process, descriptor or shared memory is left, and so no namespace, which would need one of the first two.

    python benchmarks/endurance.py [--faults 200] [--seed 0] [--hosts 3] [--undisturbed 90] [--json FILE]

Needs root, for emulated hosts. A fault takes about 15 s on two cores.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import torch
from broken_run import BATCH, LR, MOMENTUM, BrokenRun, Survived, Use
from endurance_workload import SAMPLES, make_workload
from faults import KINDS
from paired import write_results
from rich.console import Console
from rich.table import Table
from sample_ledger import Positions, check_every_sample_once, check_redone, read_ledger

from paceline.launch.emulation.hosts import emulated_hosts
from paceline.records import read_run
from paceline.records.events import LogEvent, ResumedEvent, events_of
from paceline.workloads.sampler import Sampler

SHARED_MEMORY = Path("/dev/shm")
LOSS_TOLERANCE = 1e-3
MEMORY_KB_PER_FAULT = 200.0
"""Growth of the launcher that counts as none: less than its resident memory changes by chance."""
DESCRIPTORS_PER_FAULT = 0.1
RANK_GROWTH_PER_MINUTE = 0.01


@contextmanager
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """Check that no process, shared memory or descriptor is left after a `with` block."""
    me = psutil.Process()
    shared_before, files_before = set(SHARED_MEMORY.iterdir()), me.num_fds()
    yield
    processes = psutil.process_iter(["cmdline"])
    left = [process for process in processes if str(folder) in " ".join(process.info["cmdline"] or [])]
    assert not left, f"{len(left)} processes are left: {left}"
    shared = set(SHARED_MEMORY.iterdir()) - shared_before
    assert not shared, f"shared memory is left: {sorted(shared)}"
    assert me.num_fds() <= files_before, f"descriptors: {files_before} before, {me.num_fds()} after"


def check(run: BrokenRun) -> dict[str, float]:
    """Check the whole run; return its figures. Raise `AssertionError` for what is wrong."""
    events = run.events()
    steps, sampler = run.last_step(), Sampler(SAMPLES, BATCH, seed=0)
    positions = Positions(sampler, steps)
    trained = read_ledger(run.ledger, positions)
    check_every_sample_once(trained, positions, steps)
    resumed = [(event.step, event.redone) for event in events_of(events, ResumedEvent)]
    redone = check_redone(trained, resumed)
    losses = [loss for log in events_of(read_run(run.record).events, LogEvent) for loss in log.losses]
    assert len(losses) == steps, f"{len(losses)} losses were recorded of {steps} steps"
    difference = largest_difference(losses, undisturbed_losses(sampler, steps))
    assert difference < LOSS_TOLERANCE, f"losses differ from those of an undisturbed run by {difference:.1e}"
    memory = slope_per_fault(run.uses, lambda use: use.resident_kb)
    descriptors = slope_per_fault(run.uses, lambda use: use.descriptors)
    assert memory < MEMORY_KB_PER_FAULT, f"host 0's launcher grows by {memory:.0f} kB per fault"
    assert descriptors < DESCRIPTORS_PER_FAULT, f"host 0's launcher keeps {descriptors:.2f} descriptors per fault"
    return {
        "steps": steps,
        "epochs": steps / sampler.steps,
        "steps_trained_again": redone,
        "steps_announced_to_be_trained_again": sum(again for _, again in resumed),
        "largest_loss_difference": difference,
        "launcher_kb_per_fault": memory,
        "launcher_descriptors_per_fault": descriptors,
    }


def check_memory(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Check that ranks do not grow; return by how much. The first half is left out: buffers are still being made."""
    late = samples[len(samples) // 2 :]
    if len(late) < 10:
        return {}
    times, sizes = zip(*late, strict=True)
    growth = 60 * float(np.polyfit(times, sizes, 1)[0]) / statistics.mean(sizes)
    assert growth < RANK_GROWTH_PER_MINUTE, f"ranks grow by {growth:.1%} per minute"
    return {"growth_of_ranks_per_minute": growth}


def undisturbed_losses(sampler: Sampler, steps: int) -> list[float]:
    """Return the losses of the same training without Paceline, in this process."""
    with tempfile.TemporaryDirectory() as ledger:
        os.environ |= {"PACELINE_LEDGER": ledger, "PACELINE_STEP_S": "0"}
        workload = make_workload()
        samples, numbers = workload.train
        model, loss_of = workload.model, workload.loss
        optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
        losses: list[float] = []
        for epoch in range(steps // sampler.steps + 1):
            for batch in sampler.batches(epoch):
                loss = loss_of(model(samples[batch]), numbers[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses[:steps]


def largest_difference(losses: Sequence[float | None], others: Sequence[float]) -> float:
    """Return the largest relative difference; a missing loss is infinitely different."""
    pairs = zip(losses, others, strict=True)
    return max(float("inf") if loss is None else abs(loss - other) / other for loss, other in pairs)


def slope_per_fault(uses: Sequence[Use], value: Callable[[Use], float]) -> float:
    """Return by how much a value of host 0's launcher grows per fault: the median over launchers that had five or more.

    The first fault of each is left out: it loads what later ones use too.
    """
    slopes = []
    for launcher in {use.launcher for use in uses}:
        own = [use for use in uses if use.launcher == launcher][1:]
        if len(own) >= 5:
            slopes.append(float(np.polyfit([use.fault for use in own], [value(use) for use in own], 1)[0]))
    return statistics.median(slopes) if slopes else 0.0


def show(survived: Sequence[Survived], figures: dict[str, float], console: Console) -> None:
    """Print a table of faults by kind, and the figures of the whole run."""
    columns = ("fault", "injected", "survived", "restarted", "started again", "named", "recovered, median", "longest")
    table = Table(*columns, title="Faults")
    for kind in KINDS:
        own = [one for one in survived if one.kind == kind.name]
        if not own:
            continue
        times = [one.recovered_s for one in own]
        how = [sum(one.how == way for one in own) for way in ("restarted", "started again")]
        named = "–" if kind.may_heal else str(sum(one.named for one in own))
        cells = [len(own), len(own), *how, named, f"{statistics.median(times):.1f} s", f"{max(times):.1f} s"]
        table.add_row(kind.name, *map(str, cells))
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name.replace('_', ' ')}: {value:.4g}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--undisturbed", type=float, default=90, help="seconds at the end, for the memory of ranks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    folder = Path(tempfile.mkdtemp(prefix="endurance-"))
    console.print(f"{folder}, which is kept if a check fails")
    for inner in ("ledger", "temporary"):
        (folder / inner).mkdir()
    with nothing_left_behind(folder), emulated_hosts(str(options.hosts)) as hosts:
        run = BrokenRun(hosts, folder, random.Random(options.seed))
        try:
            run.start()
            for _ in range(options.faults):
                run.renew()
                run.train_on()
                run.break_once()
                console.print(run.survived[-1].sentence, highlight=False)
            run.train_on()
            undisturbed = run.watch_ranks(options.undisturbed)
            run.stop()
        finally:
            run.kill()
    figures = check(run) | check_memory(undisturbed)
    shutil.rmtree(folder)
    show(run.survived, figures, console)
    unnamed = [one for one in run.survived if not one.named]
    if options.json:
        results = {
            "survived": [asdict(one) for one in run.survived],
            "figures": figures,
            "uses": [asdict(use) for use in run.uses],
        }
        write_results(options.json, results)
    assert not unnamed, f"{len(unnamed)} faults were not named: {unnamed}"


if __name__ == "__main__":
    main()

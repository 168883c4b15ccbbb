"""Measure all strategies under every condition that decides between them: step time ÷ that of `ddp` and of the bound.

A condition is a workload on the ranks of one host, or on four emulated hosts at a given rate. It is measured in rounds.
A round is one `paceline compare`, in which the same ranks train all strategies, in an order that rotates from round to
round. Ratios compare runs of the same round; intervals are computed over rounds, with Paceline's own statistics. A
completed round is not measured again: an interrupted benchmark resumes, and conditions can be measured one by one, also
on different machines. The table and the picture are made from the records alone, without torch.

    python benchmarks/strategies.py --list
    python benchmarks/strategies.py [--only one-host-2-cnn] [--rounds 5] [--strategies ddp,ring] [--out DIR] [--quick]
    python benchmarks/strategies.py --write docs/results.md [--out DIR]

Emulated hosts need root. The results, with their conditions: docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strategy_results import Figures, figures_of, write_results

from paceline.records.events import EndEvent
from paceline.records.experiment.design import is_experiment
from paceline.records.experiment.record import read_experiment
from paceline.strategies.registry import ENTRIES, lesson, parse_list

FOLDER = Path("runs") / "bench-strategies"
BATCH_PER_RANK = 16
LIGHT = ("--data", "digits")
HEAVY = ("--data", "synthetic:size=2048", "--precision", "bf16", "--channels-last")
VARIANTS = {"parameter_server": ("asynchronous=true",)}
"""Options that change a strategy so much that the variant is measured too."""


@dataclass(frozen=True)
class Condition:
    """A workload on some ranks, and the number of steps and rounds to measure."""

    name: str
    title: str
    workload: str
    ranks: int
    steps: int
    rounds: int
    round_s: float
    """Estimated seconds per round, for twelve strategies on two cores."""
    emulate: str = ""

    def arguments(self) -> list[str]:
        """Return the arguments of `paceline compare`."""
        data = LIGHT if self.workload == "cnn" else HEAVY
        hosts = ("--emulate", self.emulate, "--host-cpus", "0.5") if self.emulate else ()
        count = ("--ranks", str(self.ranks), "--batch-per-rank", str(BATCH_PER_RANK), "--steps", str(self.steps))
        return [self.workload, *data, *count, *hosts]


CONDITIONS = (
    Condition("one-host-2-cnn", "cnn, 2 ranks on one host", "cnn", 2, 200, 7, 40),
    Condition("one-host-4-cnn", "cnn, 4 ranks on one host", "cnn", 4, 100, 7, 60),
    Condition("one-host-2-vgg11", "vgg11, 2 ranks on one host", "vgg11", 2, 16, 5, 90),
    Condition("one-host-4-vgg11", "vgg11, 4 ranks on one host", "vgg11", 4, 12, 5, 150),
    Condition("hosts-1gbit-cnn", "cnn, 4 hosts at 1 Gbit/s", "cnn", 4, 60, 5, 90, "4@1gbit"),
    Condition("hosts-1gbit-vgg11", "vgg11, 4 hosts at 1 Gbit/s", "vgg11", 4, 12, 5, 210, "4@1gbit"),
    Condition("hosts-200mbit-cnn", "cnn, 4 hosts at 200 Mbit/s", "cnn", 4, 60, 5, 100, "4@200mbit"),
    Condition("hosts-200mbit-vgg11", "vgg11, 4 hosts at 200 Mbit/s", "vgg11", 4, 9, 3, 480, "4@200mbit"),
)


def all_strategies() -> list[str]:
    """Return all strategies, and their variants with options."""
    found = []
    for name in ENTRIES:
        options = {option.name for option in lesson(name).options} if name in VARIANTS else set()
        found += [name, *[f"{name}:{text}" for text in VARIANTS.get(name, ()) if text.partition("=")[0] in options]]
    return found


def round_folder(out: Path, condition: Condition, number: int) -> Path:
    """Return the folder of the record of a round."""
    return out / condition.name / f"round-{number}"


def is_done(folder: Path) -> bool:
    """Return whether a round was completed."""
    return is_experiment(folder) and bool(read_experiment(folder).events_of(EndEvent))


def measure(out: Path, condition: Condition, strategies: Sequence[str], number: int) -> None:
    """Measure one round, unless it is complete; an interrupted round is measured again from its start."""
    folder = round_folder(out, condition, number)
    if is_done(folder):
        return
    if folder.exists():
        shutil.rmtree(folder)
    start = (number - 1) % len(strategies)
    order = [*strategies[start:], *strategies[:start]]
    once = ("--repeats", "1", "--max-repeats", "1", "--seed", str(number), "--no-doctor", "--no-proof", "--no-evaluate")
    saved = ("--json", "--out", str(folder))
    command = [*condition.arguments(), "--strategies", ",".join(order), "--lr", "0.01", *once, *saved]
    began = time.perf_counter()
    print(f"{condition.name}, round {number}: paceline compare {' '.join(command)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "compare", *command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{condition.name}, round {number} failed:\n{done.stderr[-2000:]}")
    print(f"  {time.perf_counter() - began:.0f} s", flush=True)


def measured_rounds(out: Path, condition: Condition) -> list[Path]:
    """Return the folders of the completed rounds, in order."""
    found = sorted((out / condition.name).glob("round-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    return [folder for folder in found if is_done(folder)]


def all_figures(out: Path) -> list[Figures]:
    """Return the results of every condition that was measured."""
    found = [(condition, measured_rounds(out, condition)) for condition in CONDITIONS]
    return [figures_of(condition.title, folders) for condition, folders in found if folders]


def show_conditions(out: Path) -> None:
    """Print every condition, its estimated time, and how many of its rounds are complete."""
    for condition in CONDITIONS:
        complete = len(measured_rounds(out, condition))
        minutes = condition.rounds * condition.round_s / 60
        print(f"{condition.name:22} about {minutes:3.0f} min, {complete} of {condition.rounds} rounds are in {out}")


def chosen_conditions(only: Sequence[str], *, quick: bool) -> list[Condition]:
    """Return the named conditions, or all that this machine can measure."""
    unknown = sorted(set(only) - {condition.name for condition in CONDITIONS})
    if unknown:
        sys.exit(f"unknown condition {unknown[0]!r}; known: {', '.join(c.name for c in CONDITIONS)}")
    chosen = [condition for condition in CONDITIONS if not only or condition.name in only]
    if os.geteuid() != 0:
        if only and any(condition.emulate for condition in chosen):
            sys.exit("emulated hosts need root: run the benchmark with sudo")
        print("conditions with emulated hosts are skipped: they need root")
        chosen = [condition for condition in chosen if not condition.emulate]
    return [replace(c, steps=min(c.steps, 8), rounds=2) for c in chosen] if quick else chosen


def main() -> None:
    """Measure the conditions, or write the results of earlier measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of the conditions to measure, separated by commas")
    parser.add_argument("--strategies", default="", help="strategies to measure [default: all]")
    parser.add_argument("--rounds", type=int, help="rounds per condition [default: depends on the condition]")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the records [default: {FOLDER}]")
    parser.add_argument("--quick", action="store_true", help="two rounds of 8 steps, to check that it works")
    parser.add_argument(
        "--list", action="store_true", help="print the conditions, and how many of their rounds are complete"
    )
    parser.add_argument("--write", type=Path, help="write the tables and the picture into this page, without measuring")
    arguments = parser.parse_args()
    if arguments.list:
        show_conditions(arguments.out)
        return
    if arguments.write is None:
        strategies = parse_list(arguments.strategies) if arguments.strategies else all_strategies()
        only = [name.strip() for name in arguments.only.split(",") if name.strip()]
        for condition in chosen_conditions(only, quick=arguments.quick):
            for number in range(1, (arguments.rounds or condition.rounds) + 1):
                measure(arguments.out, condition, strategies, number)
    found = all_figures(arguments.out)
    if not found:
        sys.exit(f"{arguments.out} contains no completed round")
    for figures in found:
        print(figures.as_text())
    if arguments.write is not None:
        picture = write_results(found, arguments.write)
        print(f"written: {arguments.write}, {picture}")


if __name__ == "__main__":
    main()

"""Check what ranks really trained: every sample of every step once, and again only where a restart announced it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.workloads.sampler import Sampler

AHEAD = 2
"""Steps that ranks may have begun, and rank 0 not counted, when a fault ended them."""


@dataclass(frozen=True)
class Trained:
    """Steps that one process of a rank trained, with the samples of each."""

    began_ns: int
    samples: Mapping[int, tuple[int, ...]]
    """Samples by step, counted over all epochs."""


class Positions:
    """Find the step of a rank's share of a batch: the order of samples is known, and differs in every epoch."""

    def __init__(self, sampler: Sampler, steps: int) -> None:
        self._sampler = sampler
        self._batches = [
            frozenset(batch.tolist()) for epoch in range(steps // sampler.steps + 2) for batch in sampler.batches(epoch)
        ]
        self._steps_with: dict[int, list[int]] = defaultdict(list)
        for step, batch in enumerate(self._batches):
            for sample in batch:
                self._steps_with[sample].append(step)

    def batch(self, step: int) -> frozenset[int]:
        """Return the samples of a step."""
        return self._batches[step]

    def steps_of(self, samples: Iterable[int]) -> list[int]:
        """Return the steps whose batch has all of these samples."""
        first, *rest = samples
        return [step for step in self._steps_with.get(first, []) if self._batches[step].issuperset(rest)]


def read_ledger(folder: Path, positions: Positions) -> list[Trained]:
    """Return what each process trained, in the order in which they began.

    Raise `AssertionError` if a process trained samples that are no share of a batch, or left out a step.
    """
    trained = []
    for file in folder.glob("rank-*.txt"):
        lines = [line for line in file.read_text().split("\n")[:-1] if line]  # The last one may be truncated.
        shares = [tuple(map(int, line.split())) for line in lines]
        shares = list(itertools.dropwhile(_is_of_check, shares))
        if shares:
            trained.append(Trained(int(file.stem.rpartition("-")[2]), _place(file.name, shares, positions)))
    return sorted(trained, key=lambda one: one.began_ns)


def _is_of_check(share: tuple[int, ...]) -> bool:
    """Return whether a share is that of the check of the model before training: the first samples of the data."""
    return share == tuple(range(len(share)))


def _place(name: str, shares: list[tuple[int, ...]], positions: Positions) -> dict[int, tuple[int, ...]]:
    """Return the shares of a process by step: consecutive steps, from the only one that fits all of them."""
    fitting = [
        start
        for start in positions.steps_of(shares[0])
        if all(start + number in positions.steps_of(share) for number, share in enumerate(shares))
    ]
    assert fitting, f"{name} did not train consecutive batches: it began with the samples {shares[0]}"
    return {min(fitting) + number: share for number, share in enumerate(shares)}


def check_every_sample_once(trained: list[Trained], positions: Positions, steps: int) -> None:
    """Raise `AssertionError` if a step that counts lacks a sample, or has one twice.

    What counts is the last attempt at a step: of the ranks that trained it, those that began last.
    """
    by_step: dict[int, list[Trained]] = defaultdict(list)
    for one in trained:
        for step in one.samples:
            by_step[step].append(one)
    for step in range(steps):
        wanted, counted = positions.batch(step), Counter[int]()
        for one in reversed(by_step[step]):
            counted.update(one.samples[step])
            if counted.keys() >= wanted:
                break
        assert counted.keys() == wanted, f"step {step} lacks {len(wanted - counted.keys())} samples"
        twice = [sample for sample, times in counted.items() if times > 1]
        assert not twice, f"step {step} has {len(twice)} samples twice"


def check_redone(trained: list[Trained], resumed: list[tuple[int, int]]) -> int:
    """Return how many steps were trained again; raise `AssertionError` for one that no restart announced.

    `resumed` has the step and the announced number of steps to do again of every restart. Rank 0 counts the steps
    that it has ended. It may have been in the next one when it died, and another rank, which had ended that, in the one
    after it.
    """
    announced = Counter[int]()
    for step, redone in resumed:
        announced.update(range(step, step + redone + AHEAD))
    starts = Counter[int]()
    for step in {one_step for one in trained for one_step in one.samples}:
        starts[step] = len(_attempts_at(trained, step)) - 1
    unannounced = [step for step, again in starts.items() if again > announced[step]]
    assert not unannounced, f"steps {sorted(unannounced)[:10]} were trained again, which no restart announced"
    return sum(starts.values())


def _attempts_at(trained: list[Trained], step: int) -> list[list[Trained]]:
    """Group the processes that trained a step by attempt: a sample that occurs again begins a new one."""
    attempts: list[list[Trained]] = []
    seen: set[int] = set()
    for one in trained:
        if step not in one.samples:
            continue
        if not attempts or seen & set(one.samples[step]):
            attempts.append([])
            seen = set()
        attempts[-1].append(one)
        seen |= set(one.samples[step])
    return attempts

"""Divergence of a run: a loss that is not finite, or that has grown and stays large, or that has exploded, or many
skipped steps in a row.

Training lowers the loss, so a run that ends far above its start has failed, and its loss and accuracy say nothing about
a strategy. Growth counts only if every loss of the last part of the run is more than `GROWTH` times the largest of
the first steps. Noise between batches and spikes that recover cannot meet that: they would have to last for a tenth of
the run. A loss that is more than `EXPLOSION` times the first one counts at once, even if it falls again: the weights
are no longer those of training, and such a run mostly ends at chance level.

Losses of steps that were skipped do not count: no weight has changed in them. But a run that skips `MOST_SKIPPED` steps
in a row has diverged too: its weights or its data contain NaN, so no later step would be different.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.analysis.steps.timing import losses_of
from paceline.formatting import short, whole
from paceline.records import RunRecord
from paceline.records.events import LogEvent
from paceline.records.summary import Divergence

GROWTH = 10.0
"""Ratio of a loss to the largest of the first steps from which it is too large. Cross-entropy over ten classes starts
near 2.3, and rises to two or three times that at a learning rate that is high but trains."""
EXPLOSION = 1e6
"""Ratio of a loss to the first one from which the run has diverged, whatever follows."""
FIRST_STEPS = 5
"""Steps whose losses are those at the start."""
LAST_SHARE, LEAST_LAST_STEPS = 0.1, 10
"""Share of a run at its end, and least number of steps, in which all losses must be too large."""

MOST_SKIPPED = 50
"""Skipped steps in a row that a run may have less one. A GradScaler that starts at 2^16 and halves its scale each time
has reached 2^-34 by then, where no gradient of a finite loss overflows."""


class DivergenceDetector:
    """Detector of divergence in the losses of a run, added as they are trained; its memory is constant."""

    def __init__(self) -> None:
        self.not_finite: Divergence | None = None
        """First loss that is not finite, or start of too many skipped steps in a row; None if there is none."""
        self._steps = 0
        self._first_count = 0
        self._largest_first = -math.inf
        self._first_loss: float | None = None
        self._exploded: tuple[int, float] | None = None
        """Step and loss of the first explosion."""
        self._last_loss: float | None = None
        """Last finite loss."""
        self._too_large_since: tuple[int, float] | None = None
        """Step and loss from which on all losses are too large."""
        self._skipped_in_a_row = 0

    def add(self, losses: Iterable[float], skipped: Collection[int] = (), unreported: Collection[int] = ()) -> None:
        """Add the losses of the next steps; steps that were skipped, or whose loss is unknown, are numbered from 0."""
        for step, loss in enumerate(losses, start=self._steps):
            self._steps = step + 1
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if step in skipped else 0
            if self.not_finite is not None:
                continue
            if self._skipped_in_a_row == MOST_SKIPPED:
                first = self._steps - MOST_SKIPPED
                self.not_finite = Divergence(step=first, loss=None, before=self._last_loss, skipped=MOST_SKIPPED)
            elif not self._skipped_in_a_row and step not in unreported:
                self._add_loss(step, loss)

    def _add_loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self.not_finite = Divergence(step=step, loss=None, before=self._last_loss)
            return
        self._last_loss = loss
        if self._first_loss is None:
            self._first_loss = loss
        elif self._exploded is None and 0 < EXPLOSION * self._first_loss < loss:
            self._exploded = step, loss
        if self._first_count < FIRST_STEPS:
            self._first_count += 1
            self._largest_first = max(self._largest_first, loss)
        elif not 0 < GROWTH * self._largest_first < loss:  # A loss that starts at 0 or below has no such ratio.
            self._too_large_since = None
        elif self._too_large_since is None:
            self._too_large_since = step, loss

    @property
    def found(self) -> Divergence | None:
        """Divergence of a run that ends here; None if there is none."""
        if self.not_finite is None and self._exploded is not None:
            step, loss = self._exploded
            return Divergence(step=step, loss=loss, before=self._first_loss)
        if self.not_finite is not None or self._too_large_since is None:
            return self.not_finite
        step, loss = self._too_large_since
        if self._steps - step < max(LEAST_LAST_STEPS, LAST_SHARE * self._steps):
            return None
        return Divergence(step=step, loss=loss, before=self._largest_first)


@dataclass(frozen=True)
class DivergedRun:
    """A diverged run of a candidate."""

    seed: int | None
    """None in the record of a script without one."""
    divergence: Divergence

    @property
    def place(self) -> str:
        """Step and seed, as in "step 120 (seed 3)"."""
        return divergence_place(self.divergence.step, self.seed)


def divergence_of(run: RunRecord) -> Divergence | None:
    """Return the divergence of a run; None if it has not diverged, or if its losses were not reported."""
    detector = DivergenceDetector()
    detector.add(losses_of(run), skipped_steps_of(run))
    return detector.found


def diverged_runs(runs: Iterable[RunRecord]) -> list[DivergedRun]:
    """Return those runs that have diverged."""
    found = [(run.config.get("seed"), divergence_of(run)) for run in runs]
    return [DivergedRun(seed, divergence) for seed, divergence in found if divergence is not None]


def skipped_steps_of(run: RunRecord) -> frozenset[int]:
    """Return the steps that were skipped, because gradients were not finite."""
    return frozenset(step for log in run.events_of(LogEvent) for step in log.skipped)


def skipped_in_attempt(run: RunRecord) -> frozenset[int]:
    """Return the skipped steps in the files of ranks, counted from the first step there."""
    return frozenset(step - run.first_step for step in skipped_steps_of(run) if step >= run.first_step)


def divergence_place(step: int, seed: int | None) -> str:
    """Return step and seed of a divergence, as in "step 120 (seed 3)"."""
    return f"step {step}" if seed is None else f"step {step} (seed {seed})"


def divergence_cause(divergence: Divergence) -> str:
    """Return a clause on the loss of a diverged run."""
    if divergence.loss is not None:
        start = "" if divergence.before is None else f" ({short(divergence.before, 4)})"
        if divergence.before is not None and divergence.loss > EXPLOSION * divergence.before:
            return f"the loss is {short(divergence.loss, 3)}, more than {whole(EXPLOSION)} times the first one{start}"
        return f"from there on the loss is more than {short(GROWTH)} times that of the first steps{start}"
    if divergence.skipped:
        return f"all of {divergence.skipped} steps in a row from there on were skipped, as gradients were not finite"
    before = "" if divergence.before is None else f"; the last finite one was {short(divergence.before, 4)}"
    return f"the loss is not finite{before}"

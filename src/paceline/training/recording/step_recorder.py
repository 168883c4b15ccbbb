"""Record each step of a run on one rank: times, loss, correct predictions; never blocks the step.

Losses and counts stay on the device until they are written to the record: all of them at the end of a window, and
every half second those of steps that the device has completed. At the end of a window its steps are added to the totals
of the run, so the memory in use does not grow with the number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.analysis.summary import RankTotals
from paceline.comm.control import ControlChannel
from paceline.measure.steps import Laps, Stopwatch, TimelineRow
from paceline.records import StepRow, Steps, StepWriter
from paceline.records.events import NoiseFigures
from paceline.records.step_counter import StepCounter
from paceline.records.timeline import TimelineWriter
from paceline.training.gradient_noise import NoiseSample, NoiseShare, figures_of
from paceline.training.recording.readback import read_numbers

FLUSH_EVERY_S = 0.5
NOT_COUNTED = -1


@dataclass
class _PendingStep:
    """Step whose loss and counts are still on the device."""

    epoch: int
    samples: int
    laps: Laps
    losses: list[tuple[float, Tensor | float]]
    """(weight, loss) of each part; the weight is usually the number of samples."""
    correct: list[Tensor | int]
    global_step: int | None
    """Step number shared by all ranks, set only if ranks do not step together."""
    skipped: bool


@dataclass(frozen=True)
class WindowFigures:
    """Figures of a window's steps over all ranks."""

    losses: list[float]
    """Global mean loss of each step; NaN if no rank knows it."""
    unreported: list[int]
    """Numbers of the steps whose loss no rank knows."""
    skipped: list[int]
    """Numbers of the steps that some rank skipped, because gradients were not finite."""
    epochs: list[int]
    """Epoch of each step."""
    samples: int
    correct: int | None
    wall_s: float
    """Wall time of the slowest rank; the same on all ranks."""
    loss_sum: float
    """Sum of the losses of all samples, without those of skipped steps."""
    with_loss: int
    """Samples in that sum."""
    noise: NoiseFigures | None = None
    """Gradient noise; None if no step was measured."""


class StepRecorder:
    """Recorder of the steps of one rank."""

    def __init__(
        self,
        stopwatch: Stopwatch,
        writer: StepWriter,
        timeline: TimelineWriter | None,
        first_step: int = 0,
        counter: StepCounter | None = None,
    ) -> None:
        """Record the steps from number `first_step` on, at which the run starts or resumes.

        `counter` counts them at once, on the rank that has it.
        """
        self._stopwatch = stopwatch
        self._writer = writer
        self._timeline = timeline
        self._counter = counter
        self._spans: list[TimelineRow] = []
        self._pending: list[_PendingStep] = []
        self._samples = 0
        self._losses: list[tuple[float, Tensor | float]] = []
        self._correct: list[Tensor | int] = []
        self._window: list[tuple[int, StepRow, bool]] = []
        """(global step number, row, whether it was skipped) of each step in the open window."""
        self._noise: list[tuple[int, NoiseSample]] = []
        """(number, norms) of each step in the open window in which gradient noise was measured; the norms may be
        incomplete until the window ends."""
        self._ended = first_step
        """Steps that this rank has ended."""
        self._flushed_s = time.perf_counter()
        self.step = first_step
        """Number of the next step."""
        self.totals = RankTotals()
        """Sums over the steps of this rank in closed windows."""

    def add_micro_batch(self, samples: int, loss: Tensor, correct: Tensor | None) -> None:
        """Record one micro-batch."""
        self.add_samples(samples)
        self.add_figures(loss, samples, correct)

    def add_samples(self, samples: int) -> None:
        """Add to the samples of the current step."""
        self._samples += samples

    def add_figures(self, loss: Tensor | float | None, weight: float, correct: Tensor | int | None) -> None:
        """Record the loss and the correct predictions of a part of the step; None if unknown."""
        if loss is not None:
            self._losses.append((weight, loss.detach() if isinstance(loss, Tensor) else loss))
        if correct is not None:
            self._correct.append(correct)

    def end_step(
        self,
        epoch: int,
        laps: Laps,
        global_step: int | None = None,
        *,
        skipped: bool = False,
        noise: NoiseSample | None = None,
    ) -> None:
        """End the step, which contains all that was recorded since the last one.

        `global_step` is its number over all ranks, given if they do not step together. `skipped` is whether this rank
        made no update, because gradients were not finite. `noise` has the norms of its gradients, if measured.
        """
        if noise is not None and not skipped:
            self._noise.append((self._ended, noise))
        self._ended += 1
        step = _PendingStep(epoch, self._samples, laps, self._losses, self._correct, global_step, skipped)
        self._pending.append(step)
        if self._counter is not None:
            self._counter.count()
        self._samples, self._losses, self._correct = 0, [], []
        if time.perf_counter() - self._flushed_s > FLUSH_EVERY_S:
            self._write_steps(self._stopwatch.count_ended([pending.laps for pending in self._pending]))

    def flush(self) -> None:
        """Read losses and counts from the device and write them to the record; on a GPU, wait for the last step."""
        self._write_steps(len(self._pending))

    def _write_steps(self, count: int) -> None:
        """Write the oldest `count` of the steps that are not yet written."""
        ended, self._pending = self._pending[:count], self._pending[count:]
        rows = self._rows(ended)
        self._writer.write(rows)
        self._write_timeline(wait=not self._pending)
        self._window += [
            (row.step if step.global_step is None else step.global_step, row, step.skipped)
            for row, step in zip(rows, ended, strict=True)
        ]
        self.step += count
        self._flushed_s = time.perf_counter()

    def close_window(
        self, wall_s: float, control: ControlChannel, start: int, end: int, *, profiled: bool = False
    ) -> WindowFigures:
        """Sum the steps from `start` to `end` over the ranks; every rank calls it after training its share.

        If the data has ended before `end`, the window ends there. The times of a profiled window do not count.
        """
        self.flush()
        rows, self._window = self._window, []
        skipped_here = np.array([skipped for _, _, skipped in rows], dtype=np.bool_)
        self.totals.add(Steps.of([row for _, row, _ in rows]), profiled=profiled, skipped=skipped_here)
        own = torch.zeros(end - start, len(StepShare._fields) + len(NoiseShare._fields), dtype=torch.float64)
        if rows:  # A rank may have trained none of these steps, or several shares of one.
            shares = torch.tensor([_step_share(row, skipped) for _, row, skipped in rows], dtype=torch.float64)
            own[:, : len(StepShare._fields)].index_add_(0, torch.tensor([at - start for at, _, _ in rows]), shares)
        for number, sample in self._noise:
            own[number - start, len(StepShare._fields) :] = torch.tensor(sample.read(), dtype=torch.float64)
        self._noise = []
        totals = control.sum(own)
        filled = totals[:, StepShare._fields.index("samples")].nonzero()
        totals = totals[: int(filled.max()) + 1 if len(filled) else 0]
        totals, noise = totals.split([len(StepShare._fields), len(NoiseShare._fields)], dim=1)
        losses, known, samples, correct, uncounted, epochs, trained, skipped = totals.unbind(1)
        return WindowFigures(
            losses=(losses / known).tolist(),
            unreported=(start + (known == 0).nonzero().flatten()).tolist(),
            skipped=(start + skipped.nonzero().flatten()).tolist(),
            epochs=(epochs / trained).int().tolist(),
            samples=int(samples.sum()),
            correct=None if uncounted.any() else int(correct.sum()),
            wall_s=control.largest(wall_s),
            loss_sum=float(losses[skipped == 0].sum()),
            with_loss=int(known[skipped == 0].sum()),
            noise=figures_of(noise[skipped == 0], control.group.size()),
        )

    def _rows(self, steps: Sequence[_PendingStep]) -> list[StepRow]:
        """Return the rows of the next steps to write. Their times are read first, which waits for the device."""
        timed = self._stopwatch.read_all([step.laps for step in steps])
        losses = iter(read_numbers([loss for step in steps for _, loss in step.losses]))
        counts = iter(read_numbers([count for step in steps for count in step.correct]))
        rows = []
        for number, (step, (times, spans)) in enumerate(zip(steps, timed, strict=True), start=self.step):
            weight = loss_sum = 0.0
            for part, _ in step.losses:
                weight += part
                loss_sum += part * float(next(losses))
            correct = sum([int(next(counts)) for _ in step.correct]) if step.correct else NOT_COUNTED
            loss = loss_sum / weight if weight else None
            rows.append(StepRow(number, step.epoch, step.samples, *times, loss, correct))
            self._spans += spans
        return rows

    def _write_timeline(self, *, wait: bool) -> None:
        if self._timeline is not None and self._stopwatch.operations is not None:
            self._timeline.write(self._spans + self._stopwatch.operations.take_rows(wait=wait))
        self._spans = []


class StepShare(NamedTuple):
    """One rank's contribution to the sums of a step."""

    loss: float
    """Sum of the losses of its samples."""
    known: float
    """Samples with a known loss."""
    samples: float
    correct: float
    uncounted: float
    """Nonzero if correct predictions are not counted."""
    epoch: float
    trained: float
    """Always 1; the sum is the number of shares, since a rank may train none or several of a step's shares."""
    skipped: float
    """1 if this rank made no update, because gradients were not finite."""


def _step_share(row: StepRow, skipped: bool) -> StepShare:
    known = 0 if row.loss is None else row.samples
    uncounted = row.correct == NOT_COUNTED
    correct = 0 if uncounted else row.correct
    return StepShare((row.loss or 0.0) * known, known, row.samples, correct, uncounted, row.epoch, 1, skipped)

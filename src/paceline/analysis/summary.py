"""Summary of one run: results per rank and of the whole run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from paceline.analysis.divergence import divergence_of, skipped_in_attempt, skipped_steps_of
from paceline.analysis.resources import RankUsage, usage
from paceline.analysis.running_median import RunningMedian
from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.analysis.steps.timing import WindowTime, profiled_steps, windows_of_attempt
from paceline.records.reader import RunRecord, Steps
from paceline.records.summary import RankSummary, Split, Summary

PHASES = ("data_s", "forward_s", "backward_s", "update_s")
BoolColumn = npt.NDArray[np.bool_]


class RankTotals:
    """Sums over one rank's steps, added as they are trained, from which its summary follows.

    Memory is constant: it holds sums, and of the step times what `RunningMedian` keeps.
    """

    def __init__(self) -> None:
        self.span_s: tuple[float, float] | None = None
        """Start of the first step and end of the last; None without steps."""
        self._steps = self._samples = self._skipped_samples = self._correct = 0
        self._loss = 0.0
        self._diverged_step: int | None = None
        self._has_loss = self._has_correct = True
        self._first_step_s: float | None = None
        self._warm_up, self._later = _TimeTotals(), _TimeTotals()

    def add(self, steps: Steps, *, profiled: bool | BoolColumn = False, skipped: bool | BoolColumn = False) -> None:
        """Add the next steps. The times of profiled ones do not count, nor the losses of those that were skipped."""
        if len(steps) == 0:
            return
        times = np.column_stack([steps.total_s, *[steps[phase] for phase in PHASES]])
        self._add_times(times, ~np.broadcast_to(profiled, len(steps)))
        if self._first_step_s is None:
            self._first_step_s = float(times[0, 0])
        first_s = float(steps["start_s"][0]) if self.span_s is None else self.span_s[0]
        self.span_s = first_s, float(steps["start_s"][-1] + times[-1, 0])
        trained = ~np.broadcast_to(skipped, len(steps))
        self._add_losses(steps, trained)
        self._has_correct &= bool(steps["correct"].min() >= 0)
        self._correct += int(steps["correct"][trained].sum())
        self._samples += int(steps["samples"].sum())
        self._skipped_samples += int(steps["samples"][~trained].sum())
        self._steps += len(steps)

    def _add_times(self, times: npt.NDArray[np.float64], timed: BoolColumn) -> None:
        warm_up_left = max(0, WARM_UP_STEPS - self._steps)
        if warm_up_left:
            warm_up = slice(0 if self._steps else 1, warm_up_left)
            self._warm_up.add(times[warm_up][timed[warm_up]])
        self._later.add(times[warm_up_left:][timed[warm_up_left:]])

    def _add_losses(self, steps: Steps, trained: BoolColumn) -> None:
        self._has_loss &= steps.has_loss
        diverged = np.flatnonzero(trained & ~np.isfinite(steps["loss"]))
        if self._diverged_step is None and len(diverged):
            self._diverged_step = int(steps["step"][diverged[0]])
        with np.errstate(invalid="ignore", over="ignore"):  # Losses that diverged.
            self._loss += float((steps["loss"] * steps["samples"])[trained].sum())

    def summary(
        self,
        rank: int,
        *,
        used: RankUsage | None = None,
        peak_bytes: int | None = None,
        split: Split | None = None,
        gpu: str | None = None,
    ) -> RankSummary:
        """Return the rank's results. Without steps after the warm-up, times are of all steps but the first."""
        times = self._later if self._later.count else self._warm_up
        step_s, data_s, forward_s, backward_s, update_s = times.means()
        trained = self._samples - self._skipped_samples
        average = self._loss / trained if trained else math.nan
        counts_correct = self._has_correct and trained > 0
        resident_bytes = used.resident_bytes if used else None
        return RankSummary(
            rank=rank,
            steps=self._steps,
            samples=self._samples,
            average_loss=average if math.isfinite(average) else None,
            diverged_step=self._diverged_step if self._has_loss else None,
            accuracy=self._correct / trained if counts_correct else None,
            first_step_s=self._first_step_s,
            step_s=step_s,
            median_step_s=times.median.value,
            data_s=data_s,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            peak_bytes=peak_bytes,
            cpu_share=used.cpu_share if used else None,
            resident_bytes=None if resident_bytes is None else int(resident_bytes),
            split=split,
            skipped_samples=self._skipped_samples,
            gpu=gpu,
            gpu_busy=used.gpu_busy if used else None,
            gpu_power_w=used.gpu_power_w if used else None,
        )


class _TimeTotals:
    """Number of steps, sums of their times, and median of their durations."""

    def __init__(self) -> None:
        self.count = 0
        self.median = RunningMedian()
        self._sums = np.zeros(1 + len(PHASES))

    def add(self, times: npt.NDArray[np.float64]) -> None:
        """Add steps, one row each: its duration, then those of its phases."""
        self.count += len(times)
        self.median.add(times[:, 0])
        self._sums += times.sum(axis=0)

    def means(self) -> list[float] | list[None]:
        """Return the mean duration of a step, then of its phases; each None without steps."""
        return (self._sums / self.count).tolist() if self.count else [None] * len(self._sums)


def summarise_rank(
    rank: int,
    steps: Steps,
    windows: Iterable[WindowTime] = (),
    *,
    used: RankUsage | None = None,
    skipped: Collection[int] = (),
) -> RankSummary:
    """Return one rank's results from its steps.

    Times exclude steps in profiled windows; losses and accuracy exclude skipped steps.
    """
    totals, numbers = RankTotals(), np.arange(len(steps))
    totals.add(steps, profiled=np.isin(numbers, list(profiled_steps(windows))), skipped=np.isin(numbers, list(skipped)))
    return totals.summary(rank, used=used)


def summarise(record: RunRecord) -> Summary:
    """Return the summary of a run: as written, or, for an interrupted run, computed from its steps."""
    if record.summary is not None:
        return record.summary
    used = {rank.rank: rank for rank in usage(record)}
    windows, skipped = windows_of_attempt(record), skipped_in_attempt(record)
    ranks = [
        summarise_rank(rank, steps, windows, used=used.get(rank), skipped=skipped)
        for rank, steps in sorted(record.steps.items())
    ]
    return Summary(
        strategy=record.topology.strategy,
        steps=record.first_step + min((rank.steps for rank in ranks), default=0),
        train_s=None,
        step_s=None,
        samples_per_s=None,
        average_loss=None,
        train_accuracy=None,
        ranks=ranks,
        servers=record.topology.servers,
        traffic=None,
        sockets=None,
        untracked=None,
        clock=None,
        buffer_divergence=None,
        weight_divergence=None,
        skipped_steps=len(skipped_steps_of(record)),
        divergence=divergence_of(record),
    )

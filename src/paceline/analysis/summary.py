"""The figures of one run, per rank and as a whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.records.reader import RunRecord, Steps


@dataclass(frozen=True)
class RankSummary:
    """What one rank did in a run. A figure is None where nothing was measured."""

    rank: int
    steps: int
    samples: int
    average_loss: float | None
    """Sum of the losses of the samples trained ÷ their number; None too where one is not a number, or not told."""
    diverged_step: int | None
    """The first step whose loss is not a number."""
    accuracy: float | None
    """Share of the samples trained that were predicted right at the time."""
    first_step_s: float | None
    step_s: float | None
    """Mean time per iteration without the first."""
    median_step_s: float | None
    data_s: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    """Mean time per phase, without the first step."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def summarise_rank(rank: int, steps: Steps) -> RankSummary:
    """One rank's figures from its steps."""
    if len(steps) == 0:
        return RankSummary(rank, 0, 0, *[None] * 10)
    samples, correct = steps["samples"], steps["correct"]
    total_s = steps.total_s
    diverged = np.flatnonzero(~np.isfinite(steps["loss"]) & steps.tells_loss)
    average = float((steps["loss"] * samples).sum() / samples.sum())
    later = slice(1, None)

    def mean(column: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
        return float(column[later].mean()) if len(column) > 1 else None

    return RankSummary(
        rank=rank,
        steps=len(steps),
        samples=int(samples.sum()),
        average_loss=average if np.isfinite(average) else None,
        diverged_step=int(steps["step"][diverged[0]]) if len(diverged) else None,
        accuracy=float(correct.sum() / samples.sum()) if (correct >= 0).all() else None,
        first_step_s=float(total_s[0]),
        step_s=mean(total_s),
        median_step_s=float(np.median(total_s[later])) if len(steps) > 1 else None,
        data_s=mean(steps["data_s"]),
        forward_s=mean(steps["forward_s"]),
        backward_s=mean(steps["backward_s"]),
        update_s=mean(steps["update_s"]),
    )


def summarise(record: RunRecord) -> dict[str, Any]:
    """The figures of a run: those it wrote itself, or, where it was cut short, those that its steps still tell."""
    if record.summary is not None:
        return record.summary
    ranks = [summarise_rank(rank, steps).to_dict() for rank, steps in sorted(record.steps.items())]
    return {"ranks": ranks, "steps": min((rank["steps"] for rank in ranks), default=0)}

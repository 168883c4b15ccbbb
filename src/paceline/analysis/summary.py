"""The figures of one run, per rank and as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.analysis.resources import usage
from paceline.analysis.steps.timing import WindowTime, counted_steps, windows_of
from paceline.errors import RecordError
from paceline.records.reader import RunRecord, Steps
from paceline.records.schema import SUMMARY_FILE

RANK_NUMBERS = frozenset(
    {"samples", "average_loss", "accuracy", "first_step_s", "step_s", "forward_s", "backward_s", "update_s"}
)
"""What a reader relies on in a rank's entry of a summary, beside its number; null where it was not measured."""
NUMBERS = {
    "test": frozenset({"loss", "accuracy", "samples", "available"}),
    "estimate": frozenset({"epochs", "seconds"}),
    "untracked": frozenset({"groups", "operations"}),
}
"""The same in parts of a summary that may be missing."""


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
    """Mean time per iteration after the warm-up; in a run that is too short for that, without the first."""
    median_step_s: float | None
    data_s: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    """Mean time per phase, over the same steps."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def summarise_rank(rank: int, steps: Steps, windows: Sequence[WindowTime] = ()) -> RankSummary:
    """One rank's figures from its steps; those in windows that were profiled do not count for times."""
    if len(steps) == 0:
        return RankSummary(rank, 0, 0, *[None] * 10)
    samples, correct = steps["samples"], steps["correct"]
    total_s = steps.total_s
    diverged = np.flatnonzero(~np.isfinite(steps["loss"]) & steps.tells_loss)
    average = float((steps["loss"] * samples).sum() / samples.sum())
    counted = counted_steps(windows, len(steps))

    def mean(column: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
        return float(column[counted].mean()) if counted.any() else None

    return RankSummary(
        rank=rank,
        steps=len(steps),
        samples=int(samples.sum()),
        average_loss=average if np.isfinite(average) else None,
        diverged_step=int(steps["step"][diverged[0]]) if len(diverged) else None,
        accuracy=float(correct.sum() / samples.sum()) if (correct >= 0).all() else None,
        first_step_s=float(total_s[0]),
        step_s=mean(total_s),
        median_step_s=float(np.median(total_s[counted])) if counted.any() else None,
        data_s=mean(steps["data_s"]),
        forward_s=mean(steps["forward_s"]),
        backward_s=mean(steps["backward_s"]),
        update_s=mean(steps["update_s"]),
    )


def summarise(record: RunRecord) -> dict[str, Any]:
    """The figures of a run: those it wrote itself, or, where it was cut short, those that its steps still tell."""
    if record.summary is not None:
        _check(record.summary, str(record.path / SUMMARY_FILE))
        return record.summary
    used = {own.rank: {"cpu_share": own.cpu_share, "resident_bytes": own.resident_bytes} for own in usage(record)}
    windows = windows_of(record)
    ranks = [
        summarise_rank(rank, steps, windows).to_dict() | used.get(rank, {})
        for rank, steps in sorted(record.steps.items())
    ]
    return {"ranks": ranks, "steps": min((rank["steps"] for rank in ranks), default=0)}


def _check(summary: Mapping[str, Any], file: str) -> None:
    """Refuses a summary that lacks what readers rely on, or has something else in its place."""
    ranks = summary.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, Mapping) for rank in ranks):
        raise RecordError(f"{file} is damaged: it has no list of ranks.")
    for rank in ranks:
        _check_numbers(rank, RANK_NUMBERS | {"rank", "diverged_step"}, "a rank", file)
        if rank["rank"] is None or rank["samples"] is None:
            raise RecordError(f"{file} is damaged: a rank has no number, or no samples.")
    if "train_s" in summary:
        _check_numbers(summary, {"steps", "train_s", "samples_per_s"}, "it", file)
    for part, names in NUMBERS.items():
        if summary.get(part) is not None:
            _check_numbers(summary[part], names, part, file)
    for replica in summary.get("test_ranks") or []:
        _check_numbers(replica, {"loss", "accuracy"}, "test_ranks", file)


def _check_numbers(values: Any, names: Iterable[str], what: str, file: str) -> None:
    missing = sorted(names) if not isinstance(values, Mapping) else sorted(set(names) - values.keys())
    if missing:
        raise RecordError(f"{file} is damaged: {what} has no {', '.join(missing)}.")
    wrong = [name for name in sorted(names) if not isinstance(values[name], int | float | None)]
    if wrong:
        raise RecordError(f"{file} is damaged: {wrong[0]} of {what} is not a number.")

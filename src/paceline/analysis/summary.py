"""Summary of one run: results per rank and of the whole run."""

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
"""Required values of a rank in a summary, besides its number; null if not measured."""
NUMBERS = {
    "test": frozenset({"loss", "accuracy", "samples", "available"}),
    "estimate": frozenset({"epochs", "seconds"}),
    "untracked": frozenset({"groups", "operations"}),
}
"""Required values in optional parts of a summary."""


@dataclass(frozen=True)
class RankSummary:
    """Results of one rank in a run. A value is None if nothing was measured."""

    rank: int
    steps: int
    samples: int
    average_loss: float | None
    """Mean loss over all trained samples; None also if a loss is not finite or was not reported."""
    diverged_step: int | None
    """First step whose loss is not finite; None if there is none."""
    accuracy: float | None
    """Share of the trained samples with correct predictions, at the time of their step."""
    first_step_s: float | None
    step_s: float | None
    """Mean step time after the warm-up; in a run that is too short for that, without the first step."""
    median_step_s: float | None
    data_s: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    """The four phases are mean times over the same steps."""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)


def summarise_rank(rank: int, steps: Steps, windows: Sequence[WindowTime] = ()) -> RankSummary:
    """Return one rank's results from its steps; times exclude steps in profiled windows."""
    if len(steps) == 0:
        return RankSummary(rank, 0, 0, *[None] * 10)
    samples, correct = steps["samples"], steps["correct"]
    total_s = steps.total_s
    diverged = np.flatnonzero(~np.isfinite(steps["loss"]) & steps.has_loss)
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
    """Return the summary of a run: as written, or, for an interrupted run, computed from its steps."""
    if record.summary is not None:
        _check(record.summary, str(record.path / SUMMARY_FILE))
        return record.summary
    used = {rank.rank: {"cpu_share": rank.cpu_share, "resident_bytes": rank.resident_bytes} for rank in usage(record)}
    windows = windows_of(record)
    ranks = [
        summarise_rank(rank, steps, windows).to_dict() | used.get(rank, {})
        for rank, steps in sorted(record.steps.items())
    ]
    return {"ranks": ranks, "steps": min((rank["steps"] for rank in ranks), default=0)}


def _check(summary: Mapping[str, Any], file: str) -> None:
    """Raise `RecordError` if a summary lacks a required value or has one of the wrong type."""
    ranks = summary.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, Mapping) for rank in ranks):
        raise RecordError(f"{file} is damaged: it has no list of ranks.")
    for rank in ranks:
        _check_numbers(rank, RANK_NUMBERS | {"rank", "diverged_step"}, "a rank", file)
        if rank["rank"] is None or rank["samples"] is None:
            raise RecordError(f"{file} is damaged: a rank has no number or no samples.")
    if "train_s" in summary:
        _check_numbers(summary, {"steps", "train_s", "samples_per_s"}, "it", file)
    for part, names in NUMBERS.items():
        if summary.get(part) is not None:
            _check_numbers(summary[part], names, part, file)
    for replica in summary.get("test_by_rank") or []:
        _check_numbers(replica, {"loss", "accuracy"}, "test_by_rank", file)


def _check_numbers(values: Any, names: Iterable[str], what: str, file: str) -> None:
    missing = sorted(names) if not isinstance(values, Mapping) else sorted(set(names) - values.keys())
    if missing:
        raise RecordError(f"{file} is damaged: {what} has no {', '.join(missing)}.")
    wrong = [name for name in sorted(names) if not isinstance(values[name], int | float | None)]
    if wrong:
        raise RecordError(f"{file} is damaged: {wrong[0]} of {what} is not a number.")

"""Summary of one run: results per rank and of the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.analysis.resources import RankUsage, usage
from paceline.analysis.steps.timing import WindowTime, counted_steps, windows_of
from paceline.records.reader import RunRecord, Steps
from paceline.records.summary import RankSummary, Summary


def summarise_rank(
    rank: int,
    steps: Steps,
    windows: Sequence[WindowTime] = (),
    *,
    used: RankUsage | None = None,
    peak_bytes: int | None = None,
) -> RankSummary:
    """Return one rank's results from its steps; times exclude steps in profiled windows."""
    samples, correct = steps["samples"], steps["correct"]
    total_s = steps.total_s
    diverged = np.flatnonzero(~np.isfinite(steps["loss"]) & steps.has_loss)
    average = float((steps["loss"] * samples).sum() / samples.sum()) if len(steps) else np.nan
    counted = counted_steps(windows, len(steps))

    def mean(column: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
        return float(column[counted].mean()) if counted.any() else None

    resident_bytes = used.resident_bytes if used else None
    return RankSummary(
        rank=rank,
        steps=len(steps),
        samples=int(samples.sum()),
        average_loss=average if np.isfinite(average) else None,
        diverged_step=int(steps["step"][diverged[0]]) if len(diverged) else None,
        accuracy=float(correct.sum() / samples.sum()) if len(steps) and (correct >= 0).all() else None,
        first_step_s=float(total_s[0]) if len(steps) else None,
        step_s=mean(total_s),
        median_step_s=float(np.median(total_s[counted])) if counted.any() else None,
        data_s=mean(steps["data_s"]),
        forward_s=mean(steps["forward_s"]),
        backward_s=mean(steps["backward_s"]),
        update_s=mean(steps["update_s"]),
        peak_bytes=peak_bytes,
        cpu_share=used.cpu_share if used else None,
        resident_bytes=None if resident_bytes is None else int(resident_bytes),
    )


def summarise(record: RunRecord) -> Summary:
    """Return the summary of a run: as written, or, for an interrupted run, computed from its steps."""
    if record.summary is not None:
        return record.summary
    used = {rank.rank: rank for rank in usage(record)}
    windows = windows_of(record)
    ranks = [summarise_rank(rank, steps, windows, used=used.get(rank)) for rank, steps in sorted(record.steps.items())]
    return Summary(
        strategy=record.topology.strategy,
        steps=min((rank.steps for rank in ranks), default=0),
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
    )

"""Results of the ranks of one candidate, and their differences in step time and traffic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.divergence import divergence_of, skipped_in_attempt
from paceline.analysis.resources import RankUsage, usage
from paceline.analysis.steps.timing import windows_of_attempt
from paceline.analysis.summary import summarise_rank
from paceline.records import RunRecord

UNEVEN = 0.05
"""Largest relative difference in step time that is normal between ranks that wait for each other in every step."""

LOSS_FIGURES = ("average_loss", "accuracy")
"""Fields of a rank's row that come from its summaries, without those of diverged runs."""
RANK_FIGURES = (
    "first_step_s",
    "step_s",
    "median_step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "update_s",
)
"""Fields of a rank's row that come from its summaries."""
HUB_SHARE = 0.95
"""Share of all bytes from which a rank counts as the hub; not 1, since buffers may take another path."""
USAGE_FIGURES = ("device_bytes", "device_used_bytes", "collections", "collection_s", "gpu_busy", "gpu_power_w")
"""Fields of a rank's row that come from samples of its process."""


@dataclass(frozen=True)
class RankRow:
    """Medians over the repeats for one rank of one candidate. A value is None if nothing was measured."""

    rank: int
    samples: int
    average_loss: float | None
    accuracy: float | None
    first_step_s: float | None
    step_s: float | None
    median_step_s: float | None
    data_s: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    peak_bytes: float | None
    cpu_share: float | None
    """CPU time ÷ wall time: 1 means one core fully used."""
    resident_bytes: float | None
    sent_bytes: int | None
    received_bytes: int | None
    device_bytes: float | None
    device_used_bytes: float | None
    collections: float | None
    """Number of garbage collections during training."""
    collection_s: float | None
    gpu_busy: float | None
    """Share of the time in which the rank's GPU ran a kernel, of any process."""
    gpu_power_w: float | None


def rank_rows(runs: Sequence[RunRecord]) -> list[RankRow]:
    """Return one row per rank that trained in any of a candidate's runs."""
    ranks = sorted({rank for run in runs for rank in run.steps})
    usages = [rank_usage for run in runs for rank_usage in usage(run)]
    return [
        _rank_row(rank, [run for run in runs if rank in run.steps], [used for used in usages if used.rank == rank])
        for rank in ranks
    ]


def _rank_row(rank: int, runs: Sequence[RunRecord], usages: Sequence[RankUsage]) -> RankRow:
    summaries = [
        summarise_rank(rank, run.steps[rank], windows_of_attempt(run), skipped=skipped_in_attempt(run)) for run in runs
    ]
    converging = [summary for summary, run in zip(summaries, runs, strict=True) if divergence_of(run) is None]
    written = [run.summary for run in runs if run.summary is not None]
    entries = [entry for summary in written for entry in summary.ranks if entry.rank == rank]
    traffic = next((summary.traffic for summary in written if summary.traffic), None)
    return RankRow(
        rank=rank,
        samples=max(summary.samples for summary in summaries),
        **{name: _median([getattr(summary, name) for summary in converging]) for name in LOSS_FIGURES},
        **{name: _median([getattr(summary, name) for summary in summaries]) for name in RANK_FIGURES},
        **{
            name: _median([getattr(entry, name) for entry in entries])
            for name in ("peak_bytes", "cpu_share", "resident_bytes")
        },
        sent_bytes=_of_rank(traffic.sent_bytes if traffic else [], rank),
        received_bytes=_of_rank(traffic.received_bytes if traffic else [], rank),
        **{name: _median([getattr(used, name) for used in usages]) for name in USAGE_FIGURES},
    )


def _of_rank(values: Sequence[int], rank: int) -> int | None:
    return values[rank] if rank < len(values) else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def rank_step_spread(ranks: Sequence[RankRow]) -> float | None:
    """Return the relative difference of the ranks' median step times; None if it is at most `UNEVEN`."""
    times = [rank.median_step_s for rank in ranks if rank.median_step_s]
    spread = max(times) / min(times) - 1 if times else 0.0
    return spread if spread > UNEVEN else None


def imbalance(ranks: Sequence[RankRow]) -> float | None:
    """Return the bytes sent and received by the busiest rank ÷ those of the least busy; None if one moves none."""
    moved = [(rank.sent_bytes or 0) + (rank.received_bytes or 0) for rank in ranks]
    return max(moved) / min(moved) if all(moved) and moved else None


def hub_rank(sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> int | None:
    """Return the rank that sends or receives nearly all bytes; None if there is none or fewer than 3 ranks."""
    if len(sent_bytes) < 3 or not sum(sent_bytes):
        return None
    moved = [sent + received for sent, received in zip(sent_bytes, received_bytes, strict=True)]
    most = max(moved)
    return moved.index(most) if most >= HUB_SHARE * sum(sent_bytes) else None

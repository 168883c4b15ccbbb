"""The ranks of one candidate: their figures, and whether they carry and take the same."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.resources import RankUsage, usage
from paceline.analysis.steps.timing import windows_of
from paceline.analysis.summary import summarise_rank
from paceline.records import RunRecord

UNEVEN = 0.05
"""Ranks that wait for each other in every step take the same time; a larger difference wants an explanation."""

RANK_FIGURES = (
    "average_loss",
    "accuracy",
    "first_step_s",
    "step_s",
    "median_step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "update_s",
)
"""What a rank's row has of its summaries."""
MIDDLE = 0.95
"""From this share of all bytes on, a rank is said to be the one that everything goes through: buffers may not."""
USAGE_FIGURES = ("device_bytes", "device_used_bytes", "collections", "collection_s")
"""What it has of what was sampled."""


@dataclass(frozen=True)
class RankRow:
    """One rank of one candidate: medians over the repeats. A figure is None where nothing was measured."""

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
    """CPU time ÷ wall time: 1 is one core all the time."""
    resident_bytes: float | None
    sent_bytes: int | None
    received_bytes: int | None
    device_bytes: float | None
    device_used_bytes: float | None
    collections: float | None
    """Garbage collections while it trained."""
    collection_s: float | None


def rank_rows(runs: Sequence[RunRecord]) -> list[RankRow]:
    """A row per rank that trained in any of a candidate's runs."""
    ranks = sorted({rank for run in runs for rank in run.steps})
    used = [own for run in runs for own in usage(run)]
    return [
        _rank_row(rank, [run for run in runs if rank in run.steps], [own for own in used if own.rank == rank])
        for rank in ranks
    ]


def _rank_row(rank: int, runs: Sequence[RunRecord], used: Sequence[RankUsage]) -> RankRow:
    own = [summarise_rank(rank, run.steps[rank], windows_of(run)) for run in runs]
    kept = [run.summary for run in runs if run.summary is not None]
    figures = [own for summary in kept for own in summary.get("ranks") or [] if own.get("rank") == rank]
    traffic: dict[str, list[int]] = next((summary["traffic"] for summary in kept if summary.get("traffic")), {})
    return RankRow(
        rank=rank,
        samples=max(summary.samples for summary in own),
        **{name: _median([getattr(summary, name) for summary in own]) for name in RANK_FIGURES},
        **{name: _median([own.get(name) for own in figures]) for name in ("peak_bytes", "cpu_share", "resident_bytes")},
        sent_bytes=_of_rank(traffic.get("sent_bytes"), rank),
        received_bytes=_of_rank(traffic.get("received_bytes"), rank),
        **{name: _median([getattr(own, name) for own in used]) for name in USAGE_FIGURES},
    )


def _of_rank(values: Sequence[int] | None, rank: int) -> int | None:
    return values[rank] if values is not None and rank < len(values) else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def uneven(ranks: Sequence[RankRow]) -> float | None:
    """By how much the ranks' median steps differ, if that is more than waiting for each other explains."""
    times = [rank.median_step_s for rank in ranks if rank.median_step_s]
    apart = max(times) / min(times) - 1 if times else 0.0
    return apart if apart > UNEVEN else None


def imbalance(ranks: Sequence[RankRow]) -> float | None:
    """The bytes that the busiest rank moves, in and out, ÷ those of the least busy."""
    moved = [(rank.sent_bytes or 0) + (rank.received_bytes or 0) for rank in ranks]
    return max(moved) / min(moved) if all(moved) and moved else None


def rank_in_the_middle(sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> int | None:
    """The rank that everything goes to or comes from; None where there is none, and of two, where both are."""
    if len(sent_bytes) < 3 or not sum(sent_bytes):
        return None
    moved = [sent + received for sent, received in zip(sent_bytes, received_bytes, strict=True)]
    most = max(moved)
    return moved.index(most) if most >= MIDDLE * sum(sent_bytes) else None

"""The time split of a contender: over its ranks and repeats, as shares of a step and in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from paceline.analysis.split import PARTS, Split, mean_split, split_of
from paceline.analysis.statistics import Estimate, of_levels
from paceline.analysis.timing import profiled_steps, windows_of
from paceline.records import RunRecord

Known = TypeVar("Known")


@dataclass(frozen=True)
class RowSplit:
    """Where a contender's step goes. Shares are of the step, means over the ranks, medians over the repeats."""

    compute: Estimate
    overlapped: Estimate
    exposed: Estimate
    other: Estimate
    data: Estimate
    """A part of `other`."""
    stolen: Estimate | None
    """A part of `compute` and `overlapped`."""
    overlap: Estimate | None
    """The share of communication that is hidden; None where nothing is sent."""
    mean: Split
    """In seconds, over ranks and repeats."""
    ranks: dict[int, Split]
    """The same for each rank."""


def row_split(runs: Sequence[RunRecord]) -> RowSplit | None:
    """The split of a contender's runs; None where none of them collected events."""
    found = [ranks for run in runs if (ranks := splits_of(run))]
    means = [mean for ranks in found if (mean := mean_split(list(ranks.values()))) is not None]
    if not means:
        return None
    overlaps = [split.overlap for split in means if split.overlap is not None]
    stolen = [split.stolen_s / split.step_s for split in means if split.stolen_s is not None]
    shares = {part: _certain(of_levels([split.share(part) for split in means])) for part in (*PARTS, "data")}
    by_rank = {rank: [ranks[rank] for ranks in found if rank in ranks] for rank in sorted(found[0])}
    return RowSplit(
        **shares,
        stolen=of_levels(stolen),
        overlap=of_levels(overlaps),
        mean=_certain(mean_split(means)),
        ranks={rank: _certain(mean_split(splits)) for rank, splits in by_rank.items()},
    )


def splits_of(run: RunRecord) -> dict[int, Split]:
    """The mean split of each rank of a run: what it wrote itself, or, in a run cut short, what its events tell."""
    kept = [rank for rank in (run.summary or {}).get("ranks") or [] if isinstance(rank.get("split"), dict)]
    if kept:
        return {int(rank["rank"]): _read(rank["split"]) for rank in kept}
    profiled = profiled_steps(windows_of(run))
    splits = {rank: split_of(timeline, profiled) for rank, timeline in run.timelines.items()}
    return {rank: split for rank, split in splits.items() if split is not None}


def _read(values: dict[str, Any]) -> Split:
    return Split(**{field.name: values.get(field.name) for field in fields(Split)})  # type: ignore[arg-type]


def _certain(value: Known | None) -> Known:
    assert value is not None
    return value

"""The time split of a candidate: over its ranks and repeats, as shares of a step and in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from paceline.analysis.statistics import Estimate, of_shares
from paceline.analysis.steps.split import PARTS, Split, mean_split, split_of
from paceline.analysis.steps.timing import counted_steps, profiled_steps, windows_of
from paceline.records import RunRecord

Known = TypeVar("Known")


@dataclass(frozen=True)
class CandidateSplit:
    """Where a candidate's step goes. Shares are of the step, means over ranks and repeats, so that they add up."""

    compute: Estimate
    overlapped: Estimate
    exposed: Estimate
    other: Estimate
    data: Estimate
    """A part of `other`."""
    descheduled: Estimate | None
    """A part of `compute` and `overlapped`."""
    overlap: Estimate | None
    """The share of communication that is hidden; None where nothing is sent."""
    mean: Split
    """In seconds, over ranks and repeats; see `_over_ranks`."""
    ranks: dict[int, Split]
    """The same for each rank."""


def candidate_split(runs: Sequence[RunRecord]) -> CandidateSplit | None:
    """The split of a candidate's runs; None where none of them collected events."""
    of_runs = [(run, ranks) for run in runs if (ranks := splits_of(run))]
    if not of_runs:
        return None
    found = [ranks for _, ranks in of_runs]
    means = [_over_ranks(run, ranks) for run, ranks in of_runs]
    overlaps = [split.overlap for split in means if split.overlap is not None]
    descheduled = [split.descheduled_s / split.step_s for split in means if split.descheduled_s is not None]
    whole = _certain(mean_split(means))
    shares = {
        part: _certain(_around(whole.share(part), [split.share(part) for split in means])) for part in (*PARTS, "data")
    }
    by_rank = {rank: [ranks[rank] for ranks in found if rank in ranks] for rank in sorted(found[0])}
    return CandidateSplit(
        **shares,
        descheduled=None if whole.descheduled_s is None else _around(whole.descheduled_s / whole.step_s, descheduled),
        overlap=None if whole.overlap is None else _around(whole.overlap, overlaps),
        mean=whole,
        ranks={rank: _certain(mean_split(splits)) for rank, splits in by_rank.items()},
    )


def _over_ranks(run: RunRecord, splits: dict[int, Split]) -> Split:
    """The split of a run's mean step: every step of every rank counts once.

    Where ranks do not step together a slow one has fewer of them, and so says less about the run.
    """
    windows = windows_of(run)
    steps = {rank: int(counted_steps(windows, len(rows)).sum()) for rank, rows in run.steps.items()}
    return _certain(mean_split(list(splits.values()), [max(1, steps.get(rank, 1)) for rank in splits]))


def _around(mean: float, values: Sequence[float]) -> Estimate | None:
    """The mean of shares with the interval of the repeats, stretched to hold it."""
    estimate = of_shares(values)
    if estimate is None or estimate.low is None or estimate.high is None:
        return estimate and replace(estimate, value=mean)
    return replace(estimate, value=mean, low=min(estimate.low, mean), high=max(estimate.high, mean))


def splits_of(run: RunRecord) -> dict[int, Split]:
    """The mean split of each rank of a run: what it wrote itself, or, in a run cut short, what its events tell."""
    splits = _splits_of(run)
    alone = run.topology.get("world_size") == 1
    return {rank: _alone(split) for rank, split in splits.items()} if alone else splits


def _alone(split: Split) -> Split:
    """Of one rank, whose operations put nothing on the wire: they are work of the strategy like any other."""
    return replace(
        split,
        compute_s=split.compute_s + split.overlapped_s,
        overlapped_s=0.0,
        exposed_s=0.0,
        other_s=split.other_s + split.exposed_s,
    )


def _splits_of(run: RunRecord) -> dict[int, Split]:
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

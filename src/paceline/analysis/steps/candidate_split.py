"""Time split of a candidate over its ranks and repeats, as shares of a step and in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from paceline.analysis.statistics import Estimate, estimate_shares
from paceline.analysis.steps.split import PARTS, mean_split, split_of
from paceline.analysis.steps.timing import counted_steps, profiled_steps, windows_of_attempt
from paceline.records import RunRecord
from paceline.records.summary import Split

T = TypeVar("T")


@dataclass(frozen=True)
class CandidateSplit:
    """Time split of a candidate. Shares of the step are means over ranks and repeats, so that they add up to 1."""

    compute: Estimate
    overlapped: Estimate
    exposed: Estimate
    other: Estimate
    data: Estimate
    """Part of `other`."""
    descheduled: Estimate | None
    """Part of `compute` and `overlapped`; None on a GPU."""
    overlap: Estimate | None
    """Share of communication that is overlapped; None if nothing is sent."""
    mean: Split
    """Mean over ranks and repeats, in seconds; see `_over_ranks`."""
    ranks: dict[int, Split]
    """Mean over repeats of each rank, in seconds."""


def candidate_split(runs: Sequence[RunRecord]) -> CandidateSplit | None:
    """Return the split of a candidate's runs; None if none of them collected events."""
    of_runs = [(run, ranks) for run in runs if (ranks := splits_of(run))]
    if not of_runs:
        return None
    found = [ranks for _, ranks in of_runs]
    means = [_over_ranks(run, ranks) for run, ranks in of_runs]
    overlaps = [split.overlap for split in means if split.overlap is not None]
    descheduled = [split.descheduled_s / split.step_s for split in means if split.descheduled_s is not None]
    whole = _known(mean_split(means))
    shares = {
        part: _known(_around(whole.share(part), [split.share(part) for split in means])) for part in (*PARTS, "data")
    }
    by_rank = {rank: [ranks[rank] for ranks in found if rank in ranks] for rank in sorted(found[0])}
    return CandidateSplit(
        **shares,
        descheduled=None if whole.descheduled_s is None else _around(whole.descheduled_s / whole.step_s, descheduled),
        overlap=None if whole.overlap is None else _around(whole.overlap, overlaps),
        mean=whole,
        ranks={rank: _known(mean_split(splits)) for rank, splits in by_rank.items()},
    )


def mean_split_of(run: RunRecord) -> Split | None:
    """Return the split of a run's mean step over all ranks; None if it collected no events."""
    splits = splits_of(run)
    return _over_ranks(run, splits) if splits else None


def _over_ranks(run: RunRecord, splits: dict[int, Split]) -> Split:
    """Return the mean split over all steps of all ranks; every step has the same weight.

    Under an asynchronous strategy, slow ranks have fewer steps and so a smaller weight.
    """
    windows = windows_of_attempt(run)
    steps = {rank: int(counted_steps(windows, len(rows)).sum()) for rank, rows in run.steps.items()}
    return _known(mean_split(list(splits.values()), [max(1, steps.get(rank, 1)) for rank in splits]))


def _around(mean: float, values: Sequence[float]) -> Estimate | None:
    """Return a mean share with the interval of the repeats, widened to contain the mean."""
    estimate = estimate_shares(values)
    if estimate is None or estimate.low is None or estimate.high is None:
        return estimate and replace(estimate, value=mean)
    return replace(estimate, value=mean, low=min(estimate.low, mean), high=max(estimate.high, mean))


def splits_of(run: RunRecord) -> dict[int, Split]:
    """Return the mean split of each rank of a run: from its summary, or, if that is missing, from its timelines."""
    splits = _splits_of(run)
    single_rank = run.topology.world_size == 1
    return {rank: _without_communication(split) for rank, split in splits.items()} if single_rank else splits


def _without_communication(split: Split) -> Split:
    """Return the split of a single rank, whose operations send nothing: their time counts as other work."""
    return msgspec.structs.replace(
        split,
        compute_s=split.compute_s + split.overlapped_s,
        overlapped_s=0.0,
        exposed_s=0.0,
        other_s=split.other_s + split.exposed_s,
    )


def _splits_of(run: RunRecord) -> dict[int, Split]:
    kept = {rank.rank: rank.split for rank in (run.summary.ranks if run.summary else []) if rank.split}
    if kept:
        return kept
    profiled = profiled_steps(windows_of_attempt(run))
    splits = {rank: split_of(timeline, profiled) for rank, timeline in run.timelines.items()}
    return {rank: split for rank, split in splits.items() if split is not None}


def _known(value: T | None) -> T:
    assert value is not None
    return value

"""Sampler of a user's DataLoader: replaced by Paceline's, honoured exactly, or refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from paceline.errors import WorkloadError
from paceline.workloads.sampler import DrawnSampler, EpochPlan, Sampler, check_indices, draw_epoch, sampler_of_size


def sampler_of_loader(loader: DataLoader[Any], plan: EpochPlan) -> Sampler:
    """Return the sampler for a DataLoader of a data set with a length.

    One that takes each sample of the data set once is replaced by ours, and so is the order of a subset. Any other is
    drawn on every rank with the same random state.
    """
    available = len(loader.dataset)  # type: ignore[arg-type]
    sampler, drop_last = _sampler_and_drop_last(loader)
    if isinstance(sampler, DistributedSampler):
        raise WorkloadError(
            "the DataLoader has a DistributedSampler, but Paceline splits each batch over the ranks itself.",
            hint="leave the sampler out",
        )
    if _takes_all(sampler, available):
        return sampler_of_size(available, plan, drop_last=drop_last)
    if type(sampler) is SubsetRandomSampler:
        subset = torch.as_tensor(sampler.indices, dtype=torch.int64).reshape(-1)
        check_indices(subset, available)
        return sampler_of_size(len(subset), plan, drop_last=drop_last, subset=subset)
    first = draw_epoch(sampler, available, plan.seed, 0)
    drawn = {"drawn_by": sampler, "available": available, "_last": {0: first}}
    return sampler_of_size(len(first), plan, DrawnSampler, drop_last=drop_last, **drawn)


def _sampler_and_drop_last(loader: DataLoader[Any]) -> tuple[Iterable[int], bool]:
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        return batches.sampler, batches.drop_last
    if batches is not None:
        raise WorkloadError(
            f"the DataLoader has a batch sampler of its own, {type(batches).__name__}, but Paceline makes the batches.",
            hint="leave it out and use --batch, or provide an iterable of global batches",
        )
    raise WorkloadError(
        "the DataLoader has batch_size=None, so its data set returns samples or batches that are not collated.",
        hint="pass the data set itself if it returns samples, or an iterable of global batches",
    )


def _takes_all(sampler: Any, available: int) -> bool:
    """Whether a sampler takes every sample once, in the order of the data set or in a random one."""
    if type(sampler) is SequentialSampler:
        return len(sampler) == available
    if type(sampler) is RandomSampler:
        whole_set = len(sampler.data_source) == available and sampler.num_samples == available
        return whole_set and not sampler.replacement
    return False

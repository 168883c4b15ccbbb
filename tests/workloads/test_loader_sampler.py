"""Tests of a DataLoader's sampler: Paceline's takes its place, or exactly its samples are trained, or it is refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.errors import UsageError, WorkloadError
from paceline.workloads.batches import Share, Source, make_source
from paceline.workloads.position import Position
from paceline.workloads.tickets import Tickets

SIZE, BATCH = 40, 8
DATA = TensorDataset(torch.arange(SIZE))
HELD_IN = [3, 5, 6, 7, 11, 13, 17, 19, 23, 29]


class Reversed:
    """Sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1, -1, -1))


class ByNumpyAndRandom:
    """Sampler that draws from the global generators of Python and numpy."""

    def __iter__(self) -> Iterator[int]:
        yield from (int(index) for index in np.random.permutation(SIZE)[:10])
        yield from random.sample(range(SIZE), 10)

    def __len__(self) -> int:
        return 20


class Shrinking:
    """Sampler that draws fewer samples in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(20 - self.epoch))


def loader_of(sampler: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, sampler=sampler, **options)


def source_of(loader: Any, rank: int = 0, workers: int = 1, **options: Any) -> Source:
    return make_source(loader, Share(rank, workers, 1, torch.device("cpu")), **{"batch": BATCH, "seed": 0} | options)


def trained(loader: Any, epoch: int | None = 0, workers: int = 2, **options: Any) -> list[int]:
    """Return the samples of an epoch, in the order of steps and ranks."""
    sources = [source_of(loader, rank, workers, **options) for rank in range(workers)]
    steps = zip(*[source.epoch(epoch) for source in sources], strict=True)
    return [
        sample
        for step in steps
        for source, pieces in zip(sources, step, strict=True)
        for piece in pieces
        for sample in source.fetch(piece)[0].tolist()
    ]


@pytest.mark.parametrize("workers", [0, 1], ids=["in this process", "in worker processes"])
def test_a_subset_is_trained_and_nothing_else(workers: int) -> None:
    loader = loader_of(SubsetRandomSampler(HELD_IN), num_workers=workers)
    assert source_of(loader).samples == len(HELD_IN)
    first, second = trained(loader, 0), trained(loader, 1)
    assert sorted(first) == sorted(second) == HELD_IN
    assert HELD_IN != first != second
    assert sorted(source_of(loader).peek(1000)[0].tolist()) == HELD_IN


def test_a_subset_is_tested_and_nothing_else() -> None:
    assert trained(loader_of(SubsetRandomSampler(HELD_IN)), None, train=False) == HELD_IN


def test_a_batch_sampler_of_torch_is_read() -> None:
    batches = BatchSampler(SubsetRandomSampler(HELD_IN), 4, drop_last=True)
    found = trained(DataLoader(DATA, batch_sampler=batches))
    assert len(found) == BATCH
    assert set(found) < set(HELD_IN)


@pytest.mark.parametrize(
    "sampler", [None, SequentialSampler(DATA), RandomSampler(DATA)], ids=["none", "sequential", "random"]
)
def test_what_takes_all_samples_is_replaced(sampler: Any) -> None:
    plain = trained(DATA)
    assert trained(loader_of(sampler)) == plain
    assert sorted(plain) == list(range(SIZE))


def test_a_weighted_sampler_draws_by_its_weights() -> None:
    weights = [float(index % 2) for index in range(SIZE)]
    loader = loader_of(WeightedRandomSampler(weights, 80))
    assert source_of(loader).samples == 80
    first, second = trained(loader, 0), trained(loader, 1)
    assert len(first) == 80
    assert all(index % 2 for index in first)
    assert max(Counter(first).values()) > 1
    assert Counter(first) != Counter(second), "each epoch is drawn anew"
    torch.rand(3)
    assert trained(loader_of(WeightedRandomSampler(weights, 80)), 1) == second, "by seed and epoch alone"


@pytest.mark.parametrize(
    ("sampler", "count"),
    [
        (RandomSampler(DATA, replacement=True, num_samples=30), 30),
        (RandomSampler(DATA, num_samples=12), 12),
        (RandomSampler(range(16)), 16),
        (SequentialSampler(range(16)), 16),
        (ByNumpyAndRandom(), 20),
    ],
    ids=["replacement", "some", "a part", "a part in order", "numpy and random"],
)
def test_every_other_sampler_is_drawn_equally_on_all_ranks(sampler: Any, count: int) -> None:
    loader = loader_of(sampler)
    by_ranks = [trained(loader, 0, workers) for workers in (1, 2, 4)]
    assert len(by_ranks[0]) == count
    assert by_ranks[0] == by_ranks[1] == by_ranks[2]


def test_a_sampler_of_the_users_own_keeps_its_order() -> None:
    assert trained(loader_of(Reversed())) == list(range(SIZE - 1, -1, -1))
    assert trained(loader_of(Reversed()), None, train=False) == list(range(SIZE - 1, -1, -1))


def test_without_reshuffling_a_sampler_is_drawn_once() -> None:
    loader = loader_of(WeightedRandomSampler([1.0] * SIZE, 20))
    source = source_of(loader, reshuffle=False)
    epochs = [[source.fetch(piece)[0].tolist() for (piece,) in source.epoch(epoch)] for epoch in (0, 3)]
    assert epochs[0] == epochs[1]


def test_a_sampler_with_its_own_generator_resumes_in_any_epoch() -> None:
    """The epochs before are drawn too, so no sample of the epoch is trained twice or left out."""

    def make() -> Source:
        return source_of(loader_of(RandomSampler(DATA, num_samples=30, generator=torch.Generator().manual_seed(7))))

    def samples(source: Source, epoch: int, skip: int = 0) -> list[int]:
        return [
            sample
            for (piece,) in source.epoch(epoch, Position(epoch_samples=skip))
            for sample in source.fetch(piece)[0].tolist()
        ]

    whole = make()
    epochs = [samples(whole, epoch) for epoch in range(4)]
    assert len(set(map(tuple, epochs))) == 4
    for epoch, trained_before in ((1, BATCH), (3, 2 * BATCH)):
        assert samples(make(), epoch, trained_before) == epochs[epoch][trained_before:]


def test_a_smaller_last_batch_is_dropped_if_the_loader_drops_it() -> None:
    data = TensorDataset(torch.arange(21))
    kept, dropping = (DataLoader(data, batch_size=4, drop_last=drop) for drop in (False, True))
    assert (len(trained(kept)), len(trained(dropping))) == (21, 16)
    assert source_of(dropping).dropped == 5
    assert len(trained(dropping, None, train=False)) == 21, "evaluation takes every sample"


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (loader_of(DistributedSampler(DATA, 2, 0)), "has a DistributedSampler, but Paceline splits"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), "has a batch sampler of its own, list"),
        (DataLoader(DATA, batch_size=None), "has batch_size=None"),
        (loader_of(SubsetRandomSampler([1, 99])), "draws sample 99, but the data set has 40"),
        (loader_of([0, 1, -41]), "draws sample -41, but the data set has 40"),
    ],
    ids=["distributed", "own batches", "no batches", "out of range", "negative"],
)
def test_what_cannot_be_honoured_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        source_of(loader)
    assert caught.value.hint


class Endless:
    """Sampler that never ends."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SIZE))


def test_a_sampler_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.workloads.sampler.MOST_DRAWN", 1000)
    with pytest.raises(WorkloadError, match="draws more than 1,000 samples in an epoch of 40"):
        source_of(loader_of(Endless()))


def test_epochs_of_one_length_are_needed() -> None:
    source = source_of(loader_of(Shrinking()))
    list(source.epoch(0))
    with pytest.raises(WorkloadError, match="drew 19 samples in epoch 2 and 20 in the first"):
        list(source.epoch(1))


def test_ranks_that_do_not_step_together_cannot_draw() -> None:
    with pytest.raises(UsageError, match="has its own sampler"):
        Tickets(source_of(loader_of(Reversed())), 1, None)
    assert Tickets(source_of(loader_of(SubsetRandomSampler(HELD_IN))), 1, None).find(0) is not None


def test_an_empty_subset_is_called_that() -> None:
    with pytest.raises(UsageError, match="the test data is empty"):
        source_of(loader_of(SubsetRandomSampler([])), train=False)

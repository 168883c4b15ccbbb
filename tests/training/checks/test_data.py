"""Tests of the comparison of the ranks' data, on real ranks: what differs is named, what is augmented is accepted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from paceline.comm import Comm
from paceline.errors import WorkloadError
from paceline.training.checks.data import check_same_data
from paceline.workloads.batches import Share, make_source
from paceline.workloads.data.images import ImageSet
from paceline.workloads.random_state import seed_everything
from ranks import Pool

SIZE = 100
X, Y = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0)), torch.arange(SIZE) % 4
Make = Callable[[int], Any]


class Augmented(Dataset[Any]):
    """Data set that changes its inputs by random numbers."""

    def __init__(self, draw: Callable[[], float], labels: Tensor = Y) -> None:
        self.draw, self.labels = draw, labels

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        x = X[index]
        return {"x": -x if self.draw() < 0.5 else x, "y": int(self.labels[index]), "noise": x + self.draw()}


class AllRandom(Augmented):
    """Data set of which nothing can be compared."""

    def __getitem__(self, index: int) -> Any:
        return X[index] + self.draw()


class Stream:
    """Iterable of global batches in the order of a function."""

    def __init__(self, order: Callable[[], Any], noise: Callable[[], float] = float) -> None:
        self.order, self.noise = order, noise

    def __iter__(self) -> Iterator[Any]:
        for indices in torch.as_tensor(np.array(self.order())).split(10):
            yield X[indices] + self.noise(), Y[indices]


def images(rank: int, change: int) -> ImageSet:
    pixels = (torch.arange(SIZE * 16) % 251).to(torch.uint8).view(SIZE, 1, 4, 4)
    pixels[SIZE - 1, 0, 0, 0] += change * rank
    return ImageSet(name="x", images=pixels, labels=Y, classes=4, mean=(0.5,), std=(0.5,), crop_padding=1, flip=True)


def own_noise(_: int) -> Callable[[], float]:
    return np.random.default_rng().random  # Without a seed: other numbers in each process.


def by_rank(rank: int) -> Callable[[], Any]:
    return np.random.default_rng(rank).random


def shuffled_x(rank: int) -> Tensor:
    return X[torch.randperm(SIZE, generator=torch.Generator().manual_seed(rank))]


SAME: dict[str, Make] = {
    "tensors": lambda _: (X, Y),
    "up to rounding": lambda rank: (X * (1 + 1e-7 * rank), Y),
    "images": lambda rank: images(rank, 0),
    "seeded split": lambda _: (X[np.random.permutation(SIZE)], Y[random.sample(range(SIZE), SIZE)]),
    "augmented by global generators": lambda _: Augmented(random.random),
    "augmented by a generator of its own": lambda rank: Augmented(own_noise(rank)),
    "augmented by a generator with a seed for each rank": lambda rank: Augmented(by_rank(rank)),
    "nothing to compare": lambda rank: AllRandom(own_noise(rank)),
    "loader": lambda _: DataLoader(TensorDataset(X, Y), num_workers=1),
    "subset": lambda _: DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([4, 2, 7])),
    "weighted": lambda _: DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * SIZE, 30)),
    "stream": lambda _: Stream(lambda: range(SIZE)),
    "stream shuffled by a global generator": lambda _: Stream(lambda: np.random.permutation(SIZE)),
    "stream with augmented inputs": lambda rank: Stream(lambda: range(SIZE), own_noise(rank)),
    "generator that runs once": lambda rank: (batch for batch in [X[rank:]]),
    "empty stream": lambda _: [],
    "paths of files": lambda rank: DataLoader([(X[index], f"/host-{rank}/{index}") for index in range(SIZE)]),
    "text": lambda _: DataLoader([f"sentence {index}" for index in range(SIZE)]),
}
OTHER: dict[str, tuple[Make, str]] = {
    "length": (lambda rank: X[: SIZE - 2 * rank], "rank 0 has 100 samples and rank 1 98"),
    "order": (shuffled_x, "sample 0 is not the same on ranks 1 and 2 as on rank 0"),
    "one rank": (lambda rank: (X, Y if rank != 2 else Y.flip(0)), "sample 0 is not the same on rank 2 as on rank 0"),
    "last image": (lambda rank: images(rank, 9), "sample 99 is not the same on ranks 1 and 2"),
    "labels of augmented samples": (
        lambda rank: Augmented(own_noise(rank), Y if rank == 0 else Y + 1),
        "sample 0 is not the same on ranks 1 and 2",
    ),
    "subset": (
        lambda rank: DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([0, 1, 2, 5 + rank])),
        "the choice of samples by the sampler is not the same on ranks 1 and 2",
    ),
    "weights": (
        lambda rank: DataLoader(TensorDataset(X), sampler=WeightedRandomSampler([1 + 50.0 * rank] + [1.0] * 99, 50)),
        "the choice of samples by the sampler is not the same",
    ),
    "text": (
        lambda rank: DataLoader([f"sentence {index + rank}" for index in range(SIZE)]),
        "sample 0 is not the same on ranks 1 and 2",
    ),
    "stream": (lambda rank: [(X[rank:], Y[rank:])], "the first batch is not the same on ranks 1 and 2"),
    "stream shuffled by a generator of its own": (
        lambda _: Stream(partial(np.random.default_rng().permutation, SIZE)),
        "the first batch is not the same",
    ),
}


def check(comm: Comm, cases: str) -> list[str]:
    """Return what the check says about each case."""
    found = []
    makes = {"same": list(SAME.values()), "other": [make for make, _ in OTHER.values()]}[cases]
    for make in makes:
        seed_everything(0)
        source = make_source(make(comm.rank), Share(comm.rank, 3, 1, torch.device("cpu")), batch=9, seed=0)
        random.seed(comm.rank)  # Ranks have other random numbers by then.
        fine = make_source((X, Y), Share(comm.rank, 3, 1, torch.device("cpu")), batch=9, seed=0, train=False)
        try:
            check_same_data({"training data": fine, "test data": source}, comm.control)
            found.append("")
        except WorkloadError as error:
            found.append(f"{error.message} hint: {error.hint}")
    return found


def test_the_same_data_passes(pool: Pool) -> None:
    for by_case in pool.run(check, 3, "same"):
        assert dict(zip(SAME, by_case, strict=True)) == dict.fromkeys(SAME, "")


def test_other_data_is_named_on_every_rank(pool: Pool) -> None:
    first, *others = pool.run(check, 3, "other")
    assert all(other == first for other in others)
    for (name, (_, message)), found in zip(OTHER.items(), first, strict=True):
        assert found.startswith("the test data differs between ranks: "), name
        assert message in found, name
        assert "numpy.random.default_rng(config.seed)" in found


def one_rank(comm: Comm) -> list[int]:
    reads: list[int] = []

    class Counted(Dataset[Any]):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return X[0]

    source = make_source(Counted(), Share(0, comm.world_size, 1, torch.device("cpu")), batch=9, seed=0)
    check_same_data({"training data": source}, comm.control)
    return reads


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_few_samples_are_read_once_and_none_on_one_rank(pool: Pool, ranks: int) -> None:
    reads = pool.run(one_rank, ranks)[0]
    assert len(reads) == len(set(reads)) <= 16
    assert (not reads) == (ranks == 1)
    assert ranks == 1 or {0, 999} < set(reads)

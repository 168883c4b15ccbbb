"""Tests of runs on ranks whose data would differ, does not fit the batch, or is not finite; with real ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, random_split

from paceline.analysis.steps.timing import losses_of
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.records import RunFolder, read_run
from paceline.training.parity.task import prove_run
from paceline.training.run import optimizer_factory, run
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool

pytestmark = pytest.mark.takes(8)

HERE = __name__
SAMPLES = 80
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1) % 3


def workload(train: Any, **fields: Any) -> Workload:
    return Workload(**{"model": nn.Linear(4, 3), "train": train, "loss": F.cross_entropy} | fields)


def split_by_all_generators() -> Workload:
    """Return training and test data that three generators divide."""
    kept = np.random.permutation(SAMPLES)[:60].tolist()
    train, test = random_split(TensorDataset(X[kept], Y[kept]), [40, 20])
    chosen = random.sample(range(40), 32)
    return workload(DataLoader(train, sampler=SubsetRandomSampler(chosen)), test=test)


def split_without_a_seed() -> Workload:
    """Return data that a generator of the user's divides, differently on each rank."""
    kept = np.random.default_rng().permutation(SAMPLES)
    return workload((X[kept[:60]], Y[kept[:60]]), test=(X[kept[60:]], Y[kept[60:]]))


def evaluated_without_a_seed() -> Workload:
    """Return test data that differs between ranks."""
    kept = np.random.default_rng().permutation(SAMPLES)
    return workload((X, Y), test=(X[kept[60:]], Y[kept[60:]]))


def not_finite() -> Workload:
    """Return tensors with a missing value."""
    broken = X.clone()
    broken[37, 2] = torch.nan
    return workload((broken, Y))


class Broken(Dataset[Any]):
    """Data set with a value that is infinite."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.full(4, np.inf if index == 37 else 1.0, dtype=np.float32), int(Y[index])


def not_finite_set() -> Workload:
    """Return a data set with an infinite value."""
    return workload(Broken())


def too_fast() -> Workload:
    """Return a workload that diverges although its data is finite."""
    return workload((X, X), model=nn.Linear(4, 4), loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e20))


class Changing:
    """Sampler that draws as the ranks do from the second epoch on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = dist.get_rank() if self.epoch else 0
        return iter([(first + index) % SAMPLES for index in range(32)])


def drawn_otherwise() -> Workload:
    """Return a sampler that differs between ranks in the second epoch."""
    return workload(DataLoader(TensorDataset(X, Y), sampler=Changing()))


class Shuffled:
    """Global batches that all three generators shuffle."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(3):
            indices = [*random.sample(range(40), 8), *np.random.permutation(40)[:8], *torch.randperm(40)[:8].tolist()]
            yield X[indices], Y[indices]


def shuffled() -> Workload:
    """Return an iterable that uses all generators, and a model that does."""
    return workload(Shuffled(), model=nn.Sequential(nn.Linear(4, 3)), loss=loss_that_draws)


def loss_that_draws(output: Tensor, target: Tensor) -> Tensor:
    """Use random numbers between batches, other ones on each rank."""
    assert random.random() + np.random.random() >= 0
    return F.cross_entropy(output, target)


# Runs on ranks.


def train(comm: Comm, settings: dict[str, Any], folder: str, proof: bool = False) -> str:
    """Return the error of a run on all ranks of the pool; empty if it succeeds."""
    world = World(
        comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
        store=dist.HashStore(),
    )  # fmt: skip
    config = RunConfig(**{"batch": 16, "events": False} | settings)
    random.seed(comm.rank)  # As in a process that has just started.
    np.random.seed(comm.rank)
    try:
        (prove_run if proof else run)(config, world, RunFolder(Path(folder)), threads=1)
    except PacelineError as error:
        return f"{type(error).__name__}: {error.message} hint: {error.hint}"
    return ""


def errors(pool: Pool, folder: Path, name: str, *, proof: bool = False, **settings: Any) -> list[str]:
    out = str(RunFolder.create(folder / name).path)
    return pool.run(train, SIZE, {"workload": f"{HERE}:{name}"} | settings, out, proof)


def test_a_split_by_any_global_generator_is_the_same_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    assert errors(pool, tmp_path, "split_by_all_generators") == [""] * SIZE
    summary = read_run(tmp_path / "split_by_all_generators").summary
    assert summary is not None
    assert summary.test.samples == 20
    assert summary.steps == 2


@pytest.mark.parametrize("proof", [False, True], ids=["run", "proof"])
def test_a_split_without_a_seed_is_refused_on_all_ranks(pool: Pool, tmp_path: Path, proof: bool) -> None:
    found = errors(pool, tmp_path, "split_without_a_seed", proof=proof)
    assert len(set(found)) == 1
    assert found[0].startswith("WorkloadError: the training data differs between ranks: sample 0 is not the same on ")
    assert "numpy.random.default_rng(config.seed)" in found[0]


def test_test_data_without_a_seed_is_refused_unless_nothing_is_tested(pool: Pool, tmp_path: Path) -> None:
    found = errors(pool, tmp_path, "evaluated_without_a_seed")
    assert all(one.startswith("WorkloadError: the test data differs between ranks") for one in found)
    assert errors(pool, tmp_path / "untested", "evaluated_without_a_seed", evaluate=False) == [""] * SIZE


@pytest.mark.parametrize("name", ["not_finite", "not_finite_set"])
def test_a_loss_that_the_data_makes_infinite_is_blamed_on_the_data(pool: Pool, tmp_path: Path, name: str) -> None:
    found = errors(pool, tmp_path, name, epochs=2)
    assert len(set(found)) == 1
    assert found[0].startswith("WorkloadError: the loss is not finite in step ")
    assert "because sample 37 of the training data contains NaN or infinity." in found[0]


def test_a_loss_that_the_learning_rate_makes_infinite_is_not(pool: Pool, tmp_path: Path) -> None:
    found = errors(pool, tmp_path, "too_fast", epochs=2)
    assert len(set(found)) == 1
    assert found[0].startswith("DivergenceError: the run diverged at step ")
    summary = read_run(tmp_path / "too_fast").summary
    assert summary is not None
    assert summary.ranks[0].diverged_step is not None


def test_a_batch_larger_than_the_data_is_refused_and_the_default_is_reduced(pool: Pool, tmp_path: Path) -> None:
    found = errors(pool, tmp_path, "too_fast", batch=100_000)
    right = "UsageError: a global batch of 100,000 is more than the 80 samples of the training data. hint: use "
    assert found == [f"{right}--batch 80 or less"] * SIZE
    each = {"batch": None, "batch_per_rank": 25_000}
    assert errors(pool, tmp_path / "each", "too_fast", **each) == [f"{right}--batch-per-rank 20 or less"] * SIZE
    assert errors(pool, tmp_path / "default", "too_fast", batch=None) == [""] * SIZE
    topology = read_run(tmp_path / "default" / "too_fast").topology
    assert (topology.batch, topology.batch_per_rank) == (80, [20])


def test_a_sampler_that_draws_by_rank_is_refused_in_its_epoch(pool: Pool, tmp_path: Path) -> None:
    found = errors(pool, tmp_path, "drawn_otherwise", epochs=3)
    right = "WorkloadError: the DataLoader's sampler drew other samples on rank 1 than on rank 0 in epoch 2."
    assert all(one.startswith(right) for one in found)
    assert errors(pool, tmp_path / "first", "drawn_otherwise") == [""] * SIZE


def losses_of_one_process(config: RunConfig) -> list[float]:
    """Return the losses of plain training on the whole batches."""
    loaded = load_workload(config)
    optimizer = optimizer_factory(loaded, None)(list(loaded.model.named_parameters()))
    source = make_source(loaded.train, Share(0, 1, 1, torch.device("cpu")), batch=1, seed=config.seed)
    losses = []
    for epoch in range(config.most_epochs):
        for (whole,) in source.epoch(epoch):
            loss = loaded.forward(loaded.model, source.fetch(whole)).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_an_iterable_may_use_any_global_generator(pool: Pool, tmp_path: Path) -> None:
    """Losses are those of one process on the whole batches, which they are only if all ranks iterate alike."""
    assert errors(pool, tmp_path, "shuffled", lr=0.01, epochs=2) == [""] * SIZE
    expected = losses_of_one_process(RunConfig(workload=f"{HERE}:shuffled", lr=0.01, epochs=2))
    assert len(expected) == 6
    assert losses_of(read_run(tmp_path / "shuffled")) == pytest.approx(expected, rel=1e-5)


def random_numbers(comm: Comm, folder: str) -> list[float]:
    """Return random numbers drawn after a run, whose set-up seeded the rank."""
    train(comm, {"workload": f"{HERE}:too_fast", "steps": 1, "evaluate": False}, folder)
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_after_set_up_all_generators_differ_between_ranks_and_repeat(pool: Pool, tmp_path: Path) -> None:
    first, second = (
        pool.run(random_numbers, SIZE, str(RunFolder.create(tmp_path / name).path)) for name in ("first", "second")
    )
    assert first == second
    assert len({number for rank in first for number in rank}) == 3 * SIZE

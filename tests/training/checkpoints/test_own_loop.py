"""Tests of `sync.save` and `sync.restore` on real ranks: any strategy and number of ranks goes on from any other."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.errors import CheckpointError, UsageError
from paceline.strategies.registry import create
from paceline.training.checkpoints import capture
from paceline.training.checkpoints.storage.load import load
from paceline.training.sync import Restored, Sync
from paceline.workloads.sampler import split
from ranks import Pool
from registered import LOSSLESS, with_options

BATCH, BEFORE, AFTER = 12, 3, 3
SMALL = {"bucketed": "bucket_mb=0.001", "priority": "slice_mb=0.001"}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=0.01)


def train(sync: Sync, first: int, steps: int, scheduler: Any = None) -> None:
    """Train steps of global batches that depend on the number of the step alone."""
    for step in range(first, first + steps):
        batch = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        own = split(BATCH, sync.ranks)[sync.rank]
        part = batch[own.start : own.stop]
        (sync.model(part).pow(2).mean() * sync.weight(len(part), BATCH)).backward()
        sync.step()
        if scheduler is not None:
            scheduler.step()


def weights(sync: Sync) -> dict[str, Tensor]:
    with sync.agreed() as model:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def saved(comm: Comm, strategy: str, folder: Path) -> dict[str, Tensor]:
    """Train, save a checkpoint, and train on; return the weights at the end."""
    sync = Sync(make_model(), sgd, create(strategy), comm, "sync")
    scheduler = torch.optim.lr_scheduler.StepLR(sync.optimizer, 2, 0.5)
    train(sync, 0, BEFORE, scheduler)
    sync.save(folder, scheduler=scheduler, extra={"epoch": 1, "seen": torch.arange(3)})
    train(sync, BEFORE, AFTER, scheduler)
    end = weights(sync)
    sync.close()
    return end


def restored(comm: Comm, strategy: str, folder: Path) -> tuple[Restored, dict[str, Tensor]]:
    """Go on from the checkpoint with other initial weights; return the weights at the end."""
    model = make_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    sync = Sync(model, sgd, create(strategy), comm, "sync")
    scheduler = torch.optim.lr_scheduler.StepLR(sync.optimizer, 2, 0.5)
    found = sync.restore(folder, scheduler=scheduler)
    train(sync, found.step, AFTER, scheduler)
    end = weights(sync)
    sync.close()
    return found, end


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


SAVED = [text for text in with_options(LOSSLESS, SMALL) if text != "single"]


@pytest.mark.parametrize("strategy", SAVED)
def test_every_strategy_to_and_from_ddp_and_to_another_number_of_ranks(
    pool: Pool, strategy: str, tmp_path: Path
) -> None:
    """From 2 ranks under a strategy to 3 under DDP, and back; momentum, schedule and statistics included."""
    there, back = tmp_path / "there", tmp_path / "back"
    ends = pool.run(saved, 2, strategy, there)
    for found, end in pool.run(restored, 3, "ddp", there):
        assert found.step == BEFORE
        assert found.extra["epoch"] == 1
        assert found.extra["seen"].tolist() == [0, 1, 2]
        assert_equal(end, ends[0])
    ends = pool.run(saved, 3, "ddp", back)
    for _, end in pool.run(restored, 2, strategy, back):
        assert_equal(end, ends[0])


@pytest.mark.soak
@pytest.mark.parametrize("after", SAVED)
@pytest.mark.parametrize("before", SAVED)
def test_every_pair_of_strategies(pool: Pool, before: str, after: str, tmp_path: Path) -> None:
    ends = pool.run(saved, 3, before, tmp_path)
    for _, end in pool.run(restored, 2, after, tmp_path):
        assert_equal(end, ends[0])


def test_to_one_process(pool: Pool, tmp_path: Path) -> None:
    ends = pool.run(saved, 2, "allreduce", tmp_path)
    ((found, end),) = pool.run(restored, 1, "single", tmp_path)
    assert found.step == BEFORE
    assert_equal(end, ends[0])


def other_optimiser(comm: Comm, folder: Path) -> list[str]:
    sync = Sync(make_model(), adamw, create("ddp"), comm, "sync")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sync.restore(folder)
    train(sync, found.step, 1)
    sync.close()
    return [str(warning.message) for warning in caught]


def test_what_is_not_restored_is_said(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved, 2, "ddp", tmp_path)
    path = tmp_path / f"step-{BEFORE:08d}"
    assert pool.run(other_optimiser, 2, tmp_path) == [
        [
            f"not restored from {path}: the state of the optimiser, which was SGD and is AdamW.",
            f"not restored from {path}: the state of the scheduler, because sync.restore() got none.",
        ],
        [],
    ]


def nothing_to_restore(comm: Comm, folder: Path) -> Restored:
    sync = Sync(make_model(), sgd, create("ddp"), comm, "sync")
    found = sync.restore(folder)
    sync.close()
    return found


def test_the_first_start_has_nothing_to_restore(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(nothing_to_restore, 2, tmp_path / "none") == [Restored(0)] * 2


def refusals(comm: Comm, folder: Path) -> list[str]:
    """Return the errors of wrong calls."""
    sync = Sync(make_model(), sgd, create("ddp"), comm, "sync")
    train(sync, 0, 1)
    found: list[str] = []
    for arguments in ({"extra": {1, 2}}, {"scheduler": 3}, {"keep": 0}):
        with pytest.raises((CheckpointError, UsageError)) as caught:
            sync.save(folder, **arguments)  # type: ignore[arg-type]
        found.append(str(caught.value))
    sync.save(folder)
    if comm.rank == 0:
        for file in (folder / "step-00000001").iterdir():
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as damaged:
        sync.restore(folder)
    sync.close()
    return [*found, str(damaged.value)]


def test_wrong_calls_are_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(refusals, 2, tmp_path)
    assert first == second
    assert first[0].startswith("the value given as extra cannot be kept in a checkpoint: extra is a set")
    assert first[1:3] == ["sync.save() got an object of type int as scheduler.", "sync.save() got keep=0."]
    assert first[3].startswith(f"{tmp_path} has no checkpoint that can be loaded.")


def own_statistics(comm: Comm, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return this rank's buffers before `save` and after `restore`, if ranks keep their own."""
    sync = Sync(make_model(), sgd, create("allreduce"), comm, "local")
    train(sync, 0, 2)
    before = {name: value.detach().clone() for name, value in sync.strategy.model.named_buffers()}
    sync.save(folder)
    train(sync, 2, 2)
    sync.restore(folder)
    after = {name: value.detach().clone() for name, value in sync.strategy.model.named_buffers()}
    sync.close()
    return before, after


def test_every_rank_keeps_its_own_statistics(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(own_statistics, 2, tmp_path)
    for before, after in found:
        assert_equal(after, before)
    first, second = (before["1.running_mean"] for before, _ in found)
    assert not torch.equal(first, second), "ranks have seen different samples"


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(1))]


def random_numbers(comm: Comm, folder: Path) -> tuple[list[float], list[float]]:
    torch.manual_seed(comm.rank)
    sync = Sync(make_model(), sgd, create("ddp"), comm, "sync")
    torch.manual_seed(comm.rank)
    draw()
    sync.save(folder)
    expected = draw()
    sync.restore(folder)
    found = draw()
    sync.close()
    return expected, found


def test_random_numbers_go_on(pool: Pool, tmp_path: Path) -> None:
    both = pool.run(random_numbers, 2, tmp_path)
    for expected, found in both:
        assert found == expected
    assert both[0][0][-1] != both[1][0][-1], "ranks have different ones"


def saved_on_a_gpu(comm: Comm, folder: Path, as_before: bool) -> None:
    """Save with the settings that are chosen for a GPU; `as_before`: as earlier versions did, which kept them."""
    sync = Sync(make_model(), adamw, create("ddp"), comm, "sync")
    train(sync, 0, 1)
    sync.optimizer.param_groups[0].update(lr=0.25, capturable=True, foreach=True, fused=False)
    present = capture.IMPLEMENTATION
    if as_before:
        capture.IMPLEMENTATION = frozenset()
    sync.save(folder)
    capture.IMPLEMENTATION = present
    sync.close()


def settings_after_restoring(comm: Comm, folder: Path) -> dict[str, Any]:
    """Restore and train a step, which fails on a CPU if the optimiser is `capturable`; return its settings."""
    sync = Sync(make_model(), adamw, create("ddp"), comm, "sync")
    (group,) = sync.optimizer.param_groups
    group.update(fused=True)
    sync.restore(folder)
    train(sync, 1, 1)
    sync.close()
    return {key: group[key] for key in ("lr", "capturable", "foreach", "fused")}


@pytest.mark.parametrize("as_before", [True, False])
def test_the_implementation_of_the_optimiser_is_that_of_the_run(pool: Pool, tmp_path: Path, as_before: bool) -> None:
    pool.run(saved_on_a_gpu, 2, tmp_path, as_before)
    (group,) = load(tmp_path / "step-00000001").param_groups
    assert group.keys() & {"capturable", "foreach", "fused"} == (
        {"capturable", "foreach", "fused"} if as_before else set()
    )
    expected = {"lr": 0.25, "capturable": False, "foreach": None, "fused": True}
    assert pool.run(settings_after_restoring, 2, tmp_path) == [expected] * 2

"""Runs that end at a target accuracy, and test-time augmentation; with real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import PacelineError, UsageError
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.events import EpochEvent, EvaluationEvent
from paceline.training.recording import windows
from paceline.training.run import run
from paceline.workloads.workload import Workload, count_top1
from ranks import SIZE, Pool

pytestmark = pytest.mark.takes(10)

HERE = __name__
X = torch.randn(48, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Y = X.mean((1, 2, 3)).gt(0).long()


def easy() -> Workload:
    """Return a workload that is learned in a few epochs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return Workload(model=model, train=(X, Y), test=(X, Y), loss=F.cross_entropy, correct=count_top1)


def flat() -> Workload:
    """Return a workload whose inputs are no images."""
    torch.manual_seed(0)
    inputs = X.flatten(1)
    model = nn.Linear(108, 2)
    return Workload(model=model, train=(inputs, Y), test=(inputs, Y), loss=F.cross_entropy, correct=count_top1)


class LeftHalf(nn.Module):
    """Model whose output depends on the left half of an image alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return two outputs per image."""
        mean = x[..., :3].mean((1, 2, 3))
        return torch.stack([-mean, mean], dim=1) * self.scale


def one_sided() -> Workload:
    """Return a workload whose results differ for mirror images."""
    return Workload(model=LeftHalf(), train=(X, Y), test=(X, Y), loss=F.cross_entropy, correct=count_top1)


def train(comm: Comm, settings: dict[str, Any], folder: str, resume: bool = False) -> str:
    """Run on all ranks; return the error."""
    world = World(
        comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
        store=dist.HashStore(),
    )  # fmt: skip
    made: dict[str, Any] = {"workload": f"{HERE}:easy", "batch": 8, "lr": 0.1, "schedule": "constant", "epochs": 30}
    try:
        with patch.multiple(windows, WINDOW_S=0, LONG_WINDOW_S=0, MIN_STEPS=7):
            more = {"resume": Path(folder)} if resume else {}
            run(RunConfig(**made | settings), world, RunFolder(Path(folder)), threads=1, **more)
    except PacelineError as error:
        return f"{type(error).__name__}: {error.message} hint: {error.hint}"
    return ""


def recorded(pool: Pool, folder: Path, **settings: Any) -> RunRecord:
    assert pool.run(train, SIZE, settings, str(RunFolder.create(folder).path)) == [""] * SIZE
    return read_run(folder)


def steps_of_ranks(record: RunRecord) -> set[int]:
    return {len(steps) for steps in record.steps.values()}


@pytest.mark.parametrize("settings", [{}, {"eval_every": "4"}, {"strategy": "allreduce"}], ids=str)
def test_all_ranks_stop_at_the_first_evaluation_that_reaches_the_target(
    pool: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    record = recorded(pool, tmp_path / "run", target=0.8, **settings)
    tests = record.events_of(EvaluationEvent)
    assert [event.step for event in tests] == [int(settings.get("eval_every", 6)) * n for n in range(1, len(tests) + 1)]
    assert all((event.test.accuracy or 0) < 0.8 for event in tests[:-1])
    assert (tests[-1].test.accuracy or 0) >= 0.8
    assert record.summary is not None
    assert record.summary.steps == tests[-1].step < 180
    assert steps_of_ranks(record) == {tests[-1].step}
    ends = [(event.epoch, event.step) for event in record.events_of(EpochEvent)]
    assert ends == [(n, min(6 * (n + 1), record.summary.steps)) for n in range(-(-record.summary.steps // 6))]


def test_a_run_that_misses_the_target_ends_at_its_length(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", workload=f"{HERE}:one_sided", lr=0.0, target=1.0, epochs=2)
    assert record.summary is not None
    assert record.summary.steps == 12


def test_an_asynchronous_run_stops_too(pool: Pool, tmp_path: Path) -> None:
    strategy = "parameter_server:asynchronous=true"  # Any accuracy but 0 is enough: the order of updates varies.
    record = recorded(pool, tmp_path / "run", strategy=strategy, target=0.01, eval_every="7")
    (test,) = record.events_of(EvaluationEvent)
    assert record.summary is not None
    assert record.summary.steps == test.step < 180


def test_a_run_that_stopped_at_its_target_goes_on_only_to_a_higher_one(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = recorded(pool, folder, target=0.7, checkpoint_every="epoch", checkpoint="sync")
    assert first.summary is not None
    steps = first.summary.steps
    assert steps < 180
    settings = {"target": 0.7, "checkpoint_every": "epoch", "checkpoint": "sync"}
    assert pool.run(train, SIZE, settings, str(folder), True) == [""] * SIZE
    again = read_run(folder).summary
    assert again is not None
    assert again.steps == steps, "its checkpoint knows that the target is reached"
    assert pool.run(train, SIZE, settings | {"target": 1.0, "epochs": 12}, str(folder), True) == [""] * SIZE
    more = read_run(folder).summary
    assert more is not None
    assert more.steps > steps


def test_mirrored_tests_use_the_mean_of_both_outputs(pool: Pool, tmp_path: Path) -> None:
    settings = {"workload": f"{HERE}:one_sided", "lr": 0.0, "epochs": 1}
    model = LeftHalf()

    def both(images: torch.Tensor) -> torch.Tensor:
        return (model(images) + model(images.flip(-1))) / 2

    wider = torch.cat([X[..., 1:2], X, X[..., -2:-1]], dim=-1)
    wider = torch.cat([wider[..., 1:2, :], wider, wider[..., -2:-1, :]], dim=-2)
    shifted = (both(wider[..., 2:, 2:]) + both(wider[..., :-2, :-2])) / 2
    means = {"none": model(X), "mirror": both(X), "mirror+shift": (both(X) + shifted) / 2}
    losses = []
    for tta, mean in means.items():
        summary = recorded(pool, tmp_path / tta, tta=tta, **settings).summary
        assert summary is not None
        assert summary.test is not None
        assert summary.test.accuracy == int(count_top1(mean, Y)) / 48
        assert summary.test.loss == pytest.approx(float(F.cross_entropy(mean, Y).detach()), rel=1e-5)
        losses.append(summary.test.loss)
    assert len({round(loss, 4) for loss in losses}) == 3, "the three ways differ"


def test_mirrored_tests_without_images_are_refused(pool: Pool, tmp_path: Path) -> None:
    folder = str(RunFolder.create(tmp_path / "run").path)
    for error in pool.run(train, SIZE, {"workload": f"{HERE}:flat", "tta": "mirror"}, folder):
        assert "--tta mirror was given, but the test inputs are no images: torch.float32 [" in error


@pytest.mark.parametrize("settings", [{"target": 0.0}, {"target": 1.5}, {"target": 0.9, "evaluate": False}], ids=str)
def test_targets_out_of_range_and_without_tests_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RunConfig(**settings)

"""Tests of runs that resume or stop, on ranks of the pool: positions, schedules of time, scalers, and rehearsals."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.errors import PreemptedError, UsageError
from paceline.records import read_run
from paceline.records.events import EpochEvent, EvaluationEvent, LogEvent
from paceline.training import stops
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load
from paceline.training.recording.windows import MIN_STEPS
from paceline.workloads.workload import Workload, count_top1
from ranks import Pool
from training.checkpoints.runs import checkpoint, positions, train, trained

HERE = __name__
ASYNCHRONOUS = "parameter_server:asynchronous=true"


def samples(count: int = 64) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)


def small() -> Workload:
    """Return a linear model; an epoch has 8 steps of 8 samples."""
    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=samples(), test=samples(), loss=F.cross_entropy, correct=count_top1)


def slow() -> Workload:
    """Return the same with steps of 10 ms."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.01)
        return F.cross_entropy(output, target)

    return Workload(model=nn.Linear(4, 3), train=samples(), loss=loss)


SMALL = {"workload": f"{HERE}:small", "batch": 8, "keep": 99}


@contextmanager
def short_windows() -> Iterator[None]:
    with patch.object(stops, "LONGEST_ASYNCHRONOUS_S", 0.2):
        yield


def test_an_asynchronous_run_that_may_be_asked_to_stop_has_short_windows(pool: Pool, tmp_path: Path) -> None:
    settings = {"workload": f"{HERE}:slow", "batch": 8, "strategy": ASYNCHRONOUS, "checkpoint_every": "1h"}
    errors = train(pool, tmp_path, stop_after=1, disturbed_by=short_windows, steps=1000, **settings)
    assert [type(error) for error in errors] == [PreemptedError] * 2, errors
    windows = [len(log.losses) for log in read_run(tmp_path).events_of(LogEvent)]
    assert len(windows) == 2
    assert windows[1] < MIN_STEPS
    assert [step for step, *_ in positions(tmp_path)] == [sum(windows)]


def test_windows_of_an_asynchronous_run_end_where_a_checkpoint_is_due(pool: Pool, tmp_path: Path) -> None:
    """Also shortly before the end of the run, where a short last window is otherwise joined with the one before."""
    trained(pool, tmp_path, **SMALL, strategy=ASYNCHRONOUS, steps=26, checkpoint_every="12")
    assert positions(tmp_path) == [(12, 1, 32), (24, 3, 0), (26, 3, 16)]


def test_an_asynchronous_run_that_resumes_with_another_batch_knows_its_position(pool: Pool, tmp_path: Path) -> None:
    """After 10 steps of 8 samples, 48 of the second epoch are left: 3 steps of 16."""
    first, second = tmp_path / "first", tmp_path / "second"
    settings = SMALL | {"strategy": ASYNCHRONOUS, "epochs": 3, "checkpoint_every": "10"}
    trained(pool, first, **settings)
    assert positions(first)[0] == (10, 1, 16)
    settings |= {"batch": 16, "checkpoint_every": "2"}
    record = trained(pool, second, resume=checkpoint(first, 10), **settings)
    assert sum(log.samples for log in record.events_of(LogEvent)) == 48 + 64
    assert positions(second) == [(12, 1, 48), (14, 2, 16), (16, 2, 48), (17, 3, 0)]


class Stream:
    """Batches without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = samples()
        yield from zip(x.split(8), y.split(8), strict=True)


def stream() -> Workload:
    return Workload(model=nn.Linear(4, 3), train=Stream(), loss=F.cross_entropy)


def test_the_position_of_an_asynchronous_run_in_a_stream_is_refused(pool: Pool, tmp_path: Path) -> None:
    settings = {"workload": f"{HERE}:stream", "strategy": ASYNCHRONOUS, "steps": 6, "checkpoint_every": "2"}
    (error,) = train(pool, tmp_path, 1, **settings)
    assert isinstance(error, UsageError)
    assert error.message.startswith("checkpoints need to know how many samples were trained, but the data is an iter")
    assert trained(pool, tmp_path / "lockstep", 1, **settings | {"strategy": "ddp"}).finished


def test_an_asynchronous_run_that_resumes_rehearses_no_step(pool: Pool, tmp_path: Path) -> None:
    """A step before the checkpoint is loaded would use up tickets, and samples would be left out."""
    first, second = tmp_path / "first", tmp_path / "second"
    settings = SMALL | {"strategy": ASYNCHRONOUS, "steps": 12, "checkpoint_every": "6", "deterministic": True}
    trained(pool, first, **settings)
    record = trained(pool, second, resume=checkpoint(first, 6), **settings)
    assert sum(log.samples for log in record.events_of(LogEvent)) == 6 * 8


def own_optimizer() -> Workload:
    """Return a workload whose optimiser has two groups, and changes their momentum itself."""

    class Gaining(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            for group in self.param_groups:
                group["momentum"] += group["gain"]
            return done

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        (weight, bias) = [parameter for _, parameter in parameters]
        groups = [{"params": [weight], "gain": 0.05}, {"params": [bias], "gain": 0.01}]
        return Gaining(groups, lr=0.1, momentum=0.5)

    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=samples(), loss=F.cross_entropy, optimizer=optimizer)


def test_the_settings_of_an_optimiser_of_the_workload_go_on(pool: Pool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = SMALL | {"workload": f"{HERE}:own_optimizer", "steps": 8, "checkpoint_every": "4"}
    trained(pool, first, **settings)
    trained(pool, second, resume=checkpoint(first, 4), **settings)
    (whole, resumed) = (load(checkpoint(folder, 8)) for folder in (first, second))
    assert [group["momentum"] for group in whole.param_groups] == pytest.approx([0.9, 0.58])
    assert resumed.param_groups == whole.param_groups
    assert torch.equal(resumed.state.model["weight"], whole.state.model["weight"])


def test_the_time_of_training_goes_on_in_another_folder(pool: Pool, tmp_path: Path) -> None:
    """The time is over at the last checkpoint; how long a step takes here is known after the first window."""
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {"workload": f"{HERE}:slow", "batch": 8, "seconds": 0.6, "checkpoint_every": "1h"}
    trained(pool, first, **settings)
    (step,) = CheckpointFolder(first / "checkpoints").steps()
    record = trained(pool, second, resume=checkpoint(first, step), **settings)
    (window,) = record.events_of(LogEvent)
    assert len(window.losses) <= WARM_UP_STEPS


def overflowing() -> Workload:
    """Return a workload whose gradients overflow in float16 until the scale of the loss is smaller."""
    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=samples(), loss=lambda out, y: 20 * F.cross_entropy(out, y))


def test_the_scale_of_the_loss_goes_on(pool: Pool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = SMALL | {"workload": f"{HERE}:overflowing", "precision": "fp16", "lr": 1e-6}
    settings |= {"steps": 12, "checkpoint_every": "6"}
    trained(pool, first, **settings)
    record = trained(pool, second, resume=checkpoint(first, 6), **settings)
    (middle, whole, resumed) = (
        load(checkpoint(folder, step)).info.loop for folder, step in ((first, 6), (first, 12), (second, 12))
    )
    assert middle["scaler"]["scale"] < 65536
    assert resumed["scaler"] == whole["scaler"]
    assert resumed["skipped_steps"] == whole["skipped_steps"]
    assert sum(len(log.skipped) for log in record.events_of(LogEvent)) == 0


EVALUATED = SMALL | {"evaluate": True, "eval_every": "5", "lr": 0.05, "steps": 12, "checkpoint_every": "5"}


@pytest.fixture(scope="module")
def evaluated(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run whose last evaluation is the best one."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    trained(pool, folder, **EVALUATED)
    assert CheckpointFolder(folder / "checkpoints").best() == 12
    return folder


def test_a_run_that_resumes_at_its_end_records_nothing_twice(pool: Pool, evaluated: Path, tmp_path: Path) -> None:
    """The last evaluation follows the last checkpoint, so it is made again."""
    again = shutil.copytree(evaluated, tmp_path / "again")
    (again / "finished").unlink()
    record, before = trained(pool, again, resume=checkpoint(again, 12), **EVALUATED), read_run(evaluated)
    assert record.finished
    for kind in (LogEvent, EvaluationEvent, EpochEvent):
        assert [event.step for event in record.events_of(kind)] == [event.step for event in before.events_of(kind)]


@pytest.mark.parametrize("evaluate", [True, False])
def test_the_best_checkpoint_is_none_of_steps_that_are_trained_again(
    pool: Pool, evaluated: Path, tmp_path: Path, evaluate: bool
) -> None:
    """From step 5, with a learning rate that makes nothing better."""
    again = shutil.copytree(evaluated, tmp_path / "again")
    settings = EVALUATED | {"lr": 1e-9, "steps": 6, "evaluate": evaluate, "eval_every": "5" if evaluate else ""}
    record = trained(pool, again, resume=checkpoint(again, 5), **settings)
    best = CheckpointFolder(again / "checkpoints").best()
    if evaluate:
        assert record.summary is not None
        assert record.summary.best is not None
        assert best == record.summary.best.step == 5
    else:
        assert best is None

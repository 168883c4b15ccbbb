"""Evaluations while training: when they happen, and that neither weights nor times depend on them; with real ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.analysis.steps.timing import step_time, windows_of
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.events import EvaluationEvent, LogEvent
from paceline.strategies.registry import create
from paceline.training.recording import windows
from paceline.training.run import run
from paceline.workloads.workload import Workload, count_top1
from ranks import SIZE, Pool
from registered import EXCHANGING, in_turn

pytestmark = pytest.mark.takes(20)

HERE = __name__
X = torch.randn(48, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Y = X.mean((1, 2, 3)).gt(0).long()
SLEEP_S = 0.1
LATE_CHANGE = 3
"""Step from which a buffer of `Scaled` changes."""
trained: list[nn.Module] = []
"""Models of this process, in the order in which they were made."""


class Scaled(nn.Module):
    """Layer that scales by a buffer, which changes only from some step on, and by other values on each rank."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls > LATE_CHANGE:
                self.scale += 0.01 * x.detach().abs().mean()
        return x * self.scale


def drawing_loss(output: Tensor, target: Tensor) -> Tensor:
    """Draw a random number in each call."""
    return F.cross_entropy(output, target) + 0 * torch.rand(())


def delicate() -> Workload:
    """Return a model that shows any change of random numbers, modes or buffers: BatchNorm, dropout, a late buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), Scaled(), nn.Linear(64, 2))
    )
    trained.append(model)
    return Workload(model=model, train=(X, Y), test=(X[:20], Y[:20]), loss=drawing_loss, correct=count_top1)


class Batches:
    """Global batches of unknown number, which can be read again."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((X[start : start + 8], Y[start : start + 8]) for start in range(0, 48, 8))


def linear(**changes: Any) -> Workload:
    """Return a small workload."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    made: dict[str, Any] = {"train": (X, Y), "test": (X, Y), "loss": F.cross_entropy, "correct": count_top1}
    return Workload(model=model, **made | changes)


def plain() -> Workload:
    """Return the small workload."""
    return linear()


def unsized() -> Workload:
    """Return training data of unknown length."""
    return linear(train=Batches())


def untested() -> Workload:
    """Return a workload without test data."""
    return linear(test=None)


def read_once() -> Workload:
    """Return test data that can be read once."""
    return linear(test=iter(Batches()))


class Exhausted(Batches):
    """Batches that are gone after they have been read to the end."""

    is_read = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.is_read:
            yield from super().__iter__()
        self.is_read = True


def exhausted() -> Workload:
    """Return test data that is empty when it is read again."""
    return linear(test=Exhausted())


def without_accuracy() -> Workload:
    """Return a workload without correct predictions."""
    return linear(correct=None)


def sleeping() -> Workload:
    """Return a workload whose evaluation takes long: each rank has one batch."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            time.sleep(SLEEP_S)
        return F.cross_entropy(output, target)

    return linear(loss=loss)


def train(comm: Comm, settings: dict[str, Any], folder: str) -> str:
    """Run on all ranks, in windows of few steps; return the error."""
    world = World(
        comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
        store=dist.HashStore(),
    )  # fmt: skip
    made: dict[str, Any] = {"workload": f"{HERE}:plain", "batch": 8, "log_every": 2, "lr": 0.01, "schedule": "constant"}
    try:
        with patch.multiple(windows, WINDOW_S=0, LONG_WINDOW_S=0, MIN_STEPS=7):
            run(RunConfig(**made | settings), world, RunFolder(Path(folder)), threads=1)
    except PacelineError as error:
        return f"{type(error).__name__}: {error.message} hint: {error.hint}"
    return ""


def recorded(pool: Pool, folder: Path, **settings: Any) -> RunRecord:
    assert pool.run(train, SIZE, settings, str(RunFolder.create(folder).path)) == [""] * SIZE
    return read_run(folder)


def evaluations(record: RunRecord) -> list[tuple[int | None, int | None]]:
    return [(event.step, event.epoch) for event in record.events_of(EvaluationEvent)]


def log_steps(record: RunRecord) -> list[int]:
    return [event.step for event in record.events_of(LogEvent)]


# Weights.


def weights_with_and_without(comm: Comm, settings: dict[str, Any], folder: str) -> list[bool]:
    """Return whether weights and buffers are the same as without evaluations, for some of them."""
    found = list[dict[str, Tensor]]()
    for every in ("", *settings.pop("evaluations")):
        trained.clear()
        own = {"workload": f"{HERE}:delicate", "steps": 8, "eval_every": every, "lr": 0.05, "events": False} | settings
        path = Path(folder) / every
        if comm.rank == 0:
            RunFolder.create(path)
        dist.barrier()
        assert train(comm, own, str(path)) == ""
        found.append(trained[-1].state_dict())
    return [all(torch.equal(found[0][key], one[key]) for key in found[0]) for one in found[1:]]


LOCKSTEP = [name for name in (*EXCHANGING, "none") if create(name).lockstep]


@pytest.mark.parametrize("strategy", in_turn(LOCKSTEP, 0))
def test_weights_do_not_depend_on_evaluations(pool: Pool, tmp_path: Path, strategy: str) -> None:
    case = {"strategy": strategy, "evaluations": ("2",)}
    assert pool.run(weights_with_and_without, SIZE, case, str(tmp_path / "runs")) == [[True]] * SIZE


@pytest.mark.parametrize("bn", ["broadcast", "local", "sync"])
def test_weights_do_not_depend_on_evaluations_in_any_batchnorm_mode(pool: Pool, tmp_path: Path, bn: str) -> None:
    case = {"bn": bn, "evaluations": ("1", "epoch")}
    assert pool.run(weights_with_and_without, SIZE, case, str(tmp_path / "runs")) == [[True, True]] * SIZE


def test_an_evaluation_while_training_is_that_of_a_run_that_ends_there(pool: Pool, tmp_path: Path) -> None:
    long = recorded(pool, tmp_path / "long", workload=f"{HERE}:delicate", steps=9, eval_every="3")
    short = recorded(pool, tmp_path / "short", workload=f"{HERE}:delicate", steps=6)
    tests = {event.step: event.test for event in long.events_of(EvaluationEvent)}
    assert short.summary is not None
    assert long.summary is not None
    assert tests[6] == short.summary.test
    assert tests[9] == long.summary.test
    assert tests[6].samples == 20


# Steps.


def test_every_few_steps(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=13, eval_every="4")
    assert evaluations(record) == [(4, 0), (8, 1), (12, 1), (13, 2)]
    assert log_steps(record) == [4, 5, 6, 8, 10, 12, 13], "windows end at evaluations"
    assert [window.warm_up for window in windows_of(record)] == [False, True] + [False] * 5


def test_every_epoch_and_not_twice_at_the_end(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", epochs=3, eval_every="epoch", eval_ranks=True)
    assert evaluations(record) == [(6, 0), (12, 1), (18, 2)]
    assert [len(event.test_by_rank) for event in record.events_of(EvaluationEvent)] == [0, 0, SIZE]
    once = recorded(pool, tmp_path / "once", steps=8, eval_every="4")
    assert evaluations(once) == [(4, 0), (8, 1)]
    marks = [mark for mark in once.marks[0] if mark.kind == "evaluation"]
    steps = once.steps[0]
    ends = (steps["start_s"] + steps.total_s).tolist()
    assert len(marks) == 2
    assert ends[3] <= marks[0].start_s <= marks[0].end_s <= steps["start_s"][4]
    assert ends[7] <= marks[1].start_s


def test_without_it_only_the_end_is_tested(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=7)
    assert evaluations(record) == [(7, 1)]
    assert record.summary is not None
    assert record.summary.best is not None
    assert (record.summary.best.step, record.summary.best.accuracy) == (7, record.summary.test.accuracy)


def test_data_of_unknown_length_is_not_tested_twice_after_its_last_step(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", workload=f"{HERE}:unsized", epochs=2, eval_every="6", eval_ranks=True)
    assert [mark.kind for mark in record.marks[0]].count("evaluation") == 3, "at steps 6 and 12, and of the replica"
    events = record.events_of(EvaluationEvent)
    assert [event.step for event in events] == [6, 12, 12]
    assert events[1].test == events[2].test
    assert [len(event.test_by_rank) for event in events] == [0, 0, SIZE]
    by_epoch = recorded(pool, tmp_path / "epochs", workload=f"{HERE}:unsized", epochs=2, eval_every="epoch")
    assert evaluations(by_epoch) == [(6, 0), (12, 1)]


def test_ranks_that_do_not_step_together_are_tested_at_the_end_of_a_window(pool: Pool, tmp_path: Path) -> None:
    strategy = "parameter_server:asynchronous=true"
    record = recorded(pool, tmp_path / "run", steps=30, strategy=strategy, bn="local", eval_every="10")
    logs = log_steps(record)
    steps = [event.step for event in record.events_of(EvaluationEvent)]
    assert logs[:3] == [5, 12, 19], "windows are as without evaluations"
    assert steps[0] == 12, "the window from 5 to 12 contains step 10"
    assert set(steps) <= set(logs)
    assert steps[-1] == 30
    by_epoch = recorded(pool, tmp_path / "epochs", epochs=4, strategy=strategy, bn="local", eval_every="epoch")
    assert len(evaluations(by_epoch)) >= 2


def test_profiled_steps_are_not_interrupted(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=12, eval_every="4", profile="7-9")
    assert evaluations(record) == [(4, 0), (10, 1), (12, 1)], "step 8 is inside the profile, which ends with step 9"


# Times.


def test_the_time_of_evaluations_is_in_no_window(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", workload=f"{HERE}:sleeping", steps=12, eval_every="2")
    steps = record.steps[0]
    elapsed_s = steps["start_s"][-1] + steps.total_s[-1] - steps["start_s"][0]
    assert record.summary is not None
    windows_s = sum(window.wall_s for window in windows_of(record))
    assert record.summary.train_s == pytest.approx(windows_s)
    assert windows_s <= elapsed_s - 5 * SLEEP_S + 0.01


def test_the_warm_up_does_not_count_even_if_evaluations_divide_it(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=9, eval_every="1")
    found = windows_of(record)
    assert [window.steps for window in found] == [1] * 9
    assert record.summary is not None
    later = sorted(window.wall_s for window in found[5:])
    assert record.summary.step_s == step_time(found) == pytest.approx((later[1] + later[2]) / 2)


def test_bytes_of_steps_are_counted_between_evaluations(pool: Pool, tmp_path: Path) -> None:
    sockets = [
        recorded(pool, tmp_path / f"run-{every}", steps=17, eval_every=every, strategy="allreduce").summary.sockets
        for every in ("", "3")
    ]
    each = [{(link.source, link.target): link.sent_bytes / own.steps for link in own.links} for own in sockets]
    assert each[0] == each[1] != {}


# Results.


def test_the_best_evaluation(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=12, eval_every="3", lr=0.3)
    tests = record.events_of(EvaluationEvent)
    best = max(tests, key=lambda event: event.test.accuracy)
    assert record.summary is not None
    assert record.summary.best is not None
    assert (record.summary.best.step, record.summary.best.accuracy) == (best.step, best.test.accuracy)
    plain = recorded(pool, tmp_path / "loss", workload=f"{HERE}:without_accuracy", steps=6, eval_every="3").summary
    assert plain is not None
    assert plain.best is not None
    assert plain.best.accuracy is None
    assert plain.best.loss == min(plain.best.loss, plain.test.loss)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("untested", "--eval-every 3 was given, but the workload has no test data. hint: give the workload test data"),
        ("read_once", "--eval-every 3 needs test data that can be read several times. hint: provide a data set"),
        ("exhausted", "the test data has no batch when it is read again. hint: provide a data set"),
    ],
)
def test_test_data_that_does_not_suffice(pool: Pool, tmp_path: Path, name: str, error: str) -> None:
    folder = str(RunFolder.create(tmp_path / "run").path)
    settings = {"workload": f"{HERE}:{name}", "steps": 9, "eval_every": "3"}
    found = pool.run(train, SIZE, settings, folder)
    assert all(one.startswith(f"WorkloadError: {error}") for one in found), found

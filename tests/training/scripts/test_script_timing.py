"""Tests of the timing of a script's loop: the limits of a step, the meaning of notes, the end of the script."""

from __future__ import annotations

import math
import threading
from collections import UserDict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.amp import GradScaler

from paceline.analysis.steps.timing import losses_of, windows_of
from paceline.analysis.summary import summarise_rank
from paceline.analysis.traffic.payload import payload_of
from paceline.comm import Comm
from paceline.config import RunConfig, Script
from paceline.errors import UsageError, WorkloadError
from paceline.records import RunFolder, read_run
from paceline.strategies.registry import create
from paceline.training.scripts.script_task import ScriptFinished
from paceline.training.scripts.script_timing import TimedSync, TimingTask, leading_dimension
from ranks import Pool
from training.recording.test_recording import check_summary

STEPS = 9


def measuring(folder: str, **settings: Any) -> TimingTask:
    config = RunConfig(strategy="ddp", steps=STEPS, **settings)
    return TimingTask(script=Script(path="there/train.py"), config=config, folder=RunFolder(Path(folder)))


def attached(comm: Comm, folder: str, strategy: str = "ddp", **settings: Any) -> TimedSync:
    torch.manual_seed(0)
    task = measuring(folder, **settings)
    comm = replace(comm, stopwatch=task.stopwatch(comm.device))
    sync = task.attach(nn.Linear(4, 3), lambda p: torch.optim.SGD(p, lr=0.1), create(strategy), comm, "broadcast")
    assert isinstance(sync, TimedSync)
    return sync


def train(comm: Comm, folder: str, notes: str) -> int:
    """Train on two different micro-batches and evaluate in between; return how often `ScriptFinished` was raised."""
    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    left = 0
    with attached(comm, folder) as sync:
        while left < 2:
            try:
                for part in (slice(0, 3), slice(3, 5)):
                    loss = F.cross_entropy(sync.model(x[part]), y[part])
                    loss.backward()
                    if notes == "all" or (notes == "rank 0" and comm.rank == 0):
                        sync.note(loss=torch.tensor(float(part.start)), samples=len(y[part]))
                with torch.no_grad():
                    sync.model(x)
                sync.step()
            except ScriptFinished:
                left += 1
    return left


def train_scaled(comm: Comm, folder: str) -> float:
    """Train with a scaler, with an overflow on one rank in the third step; return the scale at the end."""
    x, y, scaler = torch.randn(5, 4), torch.zeros(5, dtype=torch.long), GradScaler("cpu")
    with attached(comm, folder) as sync, suppress(ScriptFinished):
        for step in range(STEPS):
            loss = F.cross_entropy(sync.model(x), y)
            sync.note(loss=loss, samples=len(y))
            scaler.scale(loss * 1e38 if (step, comm.rank) == (2, 1) else loss).backward()
            sync.step(scaler=scaler)
    return scaler.get_scale()


def test_a_skipped_step_is_counted(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(train_scaled, 2, str(tmp_path)) == [2.0**15] * 2
    record = read_run(tmp_path)
    assert record.summary is not None
    assert (record.summary.steps, record.summary.skipped_steps) == (STEPS, 1)
    assert record.summary.weight_divergence == 0
    assert all(math.isfinite(loss) for loss in losses_of(record)), "losses are recorded as they were before scaling"


def test_samples_losses_and_windows(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(train, 2, str(tmp_path), "all") == [2, 2], "who holds the exit up is shown it again"
    record = read_run(tmp_path)
    assert record.finished
    assert [window.steps for window in windows_of(record)] == [5, 4]
    for steps in record.steps.values():
        assert list(steps["samples"]) == [5] * STEPS, "passes without gradients train nothing"
        assert list(steps["loss"]) == [pytest.approx((3 * 0 + 2 * 3) / 5)] * STEPS
        assert (steps["forward_s"] > 0).all()
    assert losses_of(record) == [pytest.approx(6 / 5)] * STEPS
    assert record.config["script"] == "there/train.py"
    assert record.summary is not None
    assert record.summary.traffic.sent_bytes == [60, 60]
    payload = payload_of(record)
    assert payload is not None
    assert (payload.steps, payload.deviation) == (4, 1.0), "without accumulate() both micro-batches synchronise"
    check_summary(record)


def counted(comm: Comm, folder: str, ask_at: int) -> None:
    """Train in a script that reads the agreed weights before a step."""
    with attached(comm, folder) as sync, suppress(ScriptFinished):
        for step in range(STEPS):
            if step == ask_at:
                with sync.agreed():
                    pass
            F.cross_entropy(sync.model(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long)).backward()
            sync.step()


@pytest.mark.parametrize("ask_at", [2, 7])
def test_bytes_are_counted_where_steps_are_all_that_is_sent(pool: Pool, tmp_path: Path, ask_at: int) -> None:
    pool.run(counted, 2, str(tmp_path), ask_at)
    payload = payload_of(read_run(tmp_path))
    if ask_at < 5:
        assert payload is not None
        assert (payload.steps, payload.deviation) == (4, 0.0)
    else:
        assert payload is None, "the agreed weights may have to be sent first, so that window does not count"


def test_without_losses_nothing_has_diverged(pool: Pool, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path), "none")
    record = read_run(tmp_path)
    assert losses_of(record) == []
    assert record.summary is not None
    assert record.summary.average_loss is None
    summary = summarise_rank(0, record.steps[0])
    assert (summary.samples, summary.average_loss, summary.diverged_step) == (5 * STEPS, None, None)
    assert record.summary.samples_per_s > 0


def test_one_rank_may_tell_for_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path), "rank 0")
    assert losses_of(read_run(tmp_path)) == [pytest.approx(6 / 5)] * STEPS


def trains_watched(comm: Comm, folder: str) -> None:
    """Train in a script that ends without closing anything."""
    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    sync = attached(comm, folder, profile="6-7", tensorboard=True)

    def step() -> None:
        loss = F.cross_entropy(sync.model(x), y)
        loss.backward()
        sync.note(loss=loss)
        sync.step()

    for _ in range(STEPS - 1):
        step()
    with pytest.raises(ScriptFinished):
        step()
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline resources"]


def test_a_script_is_watched_profiled_and_written_for_tensorboard(pool: Pool, tmp_path: Path) -> None:
    pool.run(trains_watched, 2, str(tmp_path))
    record = read_run(tmp_path)
    assert [(window.steps, window.profiled) for window in windows_of(record)] == [
        (5, False),
        (1, False),
        (2, True),
        (1, False),
    ]
    assert list(record.resources) == list(record.profiles) == [0, 1]
    for profile in record.profiles.values():
        assert (profile.first_step, profile.last_step) == (6, 7)
        assert {operator.name: operator.calls for operator in profile.operators}["aten::addmm"] == 1
    assert record.config["profile"] == "6-7"
    accumulator = EventAccumulator(str(tmp_path / "tensorboard" / "rank-0"))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("loss/train")] == pytest.approx(losses_of(record))


def goes_past_the_model(comm: Comm, folder: str) -> str:
    with attached(comm, folder, "none") as sync:  # Under ddp it is another error.
        sync.strategy.model.weight.sum().backward()
        with pytest.raises(WorkloadError) as refused:
            sync.step()
        return str(refused.value.hint)


def test_a_step_without_samples_is_told_so(pool: Pool, tmp_path: Path) -> None:
    (hint,) = pool.run(goes_past_the_model, 1, str(tmp_path))
    assert "call sync.model(x)" in hint
    assert "sync.note(samples=…)" in hint


def attaches_twice(comm: Comm, folder: str) -> str:
    task = measuring(folder)
    comm = replace(comm, stopwatch=task.stopwatch(comm.device))
    with task.attach(nn.Linear(2, 1), torch.optim.SGD, create("none"), comm, "local"):
        with pytest.raises(UsageError) as refused:
            task.check_attach_arguments(None, {})
        return str(refused.value)


def test_a_second_attach_is_refused(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(attaches_twice, 1, str(tmp_path)) == ["train.py calls attach() a second time."]


def test_options_without_a_name_are_a_choice_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="passes bucket_mb to attach"):
        measuring(str(tmp_path)).check_attach_arguments(None, {"bucket_mb": 1})


@pytest.mark.parametrize(
    ("inputs", "length"),
    [
        (((torch.zeros(7, 2), torch.zeros(3)), {}), 7),
        (((), {"tokens": torch.zeros(4, 9)}), 4),
        ((({"mask": None, "tokens": [torch.zeros(6)]},), {}), 6),
        (((UserDict(tokens=torch.zeros(5)),), {}), 5),
        (((torch.tensor(1.0), 3, torch.zeros(2)), {}), 2),
        (((torch.tensor(1.0), "text"), {}), None),
    ],
)
def test_the_samples_in_what_a_model_is_given(inputs: object, length: int | None) -> None:
    assert leading_dimension(inputs) == length

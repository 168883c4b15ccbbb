"""Tests of a run's record besides its steps, from one launch: resources, marks, a profile, TensorBoard scalars."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import paceline
from paceline.analysis.resources import host_usage, usage
from paceline.analysis.steps.timing import losses_of, step_time, windows_of
from paceline.records import RunRecord, read_run
from paceline.records.events import LogEvent

STEPS, WARM_UP, PROFILED = 15, 5, range(8, 10)
CONVOLUTIONS = 2
"""Number of convolutions in `cnn`."""


@dataclass(frozen=True)
class Done:
    """Finished run."""

    record: RunRecord
    process: subprocess.CompletedProcess[str]

    def scalars(self, rank: int) -> dict[str, dict[int, float]]:
        """Return the scalars in TensorBoard's files: by tag, values by step."""
        accumulator = EventAccumulator(str(self.record.path / "tensorboard" / f"rank-{rank}"))
        accumulator.Reload()
        return {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("watched") / "run"
    what = ("cnn", "--data", "synthetic:size=320", "--ranks", "2", "--batch", "32", "--lr", "0.02")
    how = ("--steps", str(STEPS), "--profile", "8-9", "--tensorboard", "--out", str(out))
    process = paceline("train", *what, *how)
    return Done(read_run(out), process)


def test_every_rank_samples_itself_and_the_first_its_host(done: Done) -> None:
    record = done.record
    assert list(record.resources) == [0, 1]
    assert np.isfinite(record.resources[0]["host_used_bytes"]).all()
    assert np.isnan(record.resources[1]["host_used_bytes"]).all()
    for used in usage(record):
        assert used.cpu_share is not None
        assert 0.05 < used.cpu_share < 8
        assert used.resident_bytes is not None
        assert 1e8 < used.resident_bytes < 2e9
        assert record.summary is not None
        own = record.summary.ranks[used.rank]
        assert own.cpu_share == pytest.approx(used.cpu_share)
        assert own.resident_bytes == pytest.approx(used.resident_bytes, abs=1)
    assert [host.ranks for host in host_usage(record)] == [[0, 1]]


def test_samples_marks_and_steps_are_on_one_clock(done: Done) -> None:
    for rank, marks in done.record.marks.items():
        steps, times = done.record.steps[rank], done.record.resources[rank]["time_s"]
        last_s = steps["start_s"][-1] + steps.total_s[-1]
        assert 0 <= times[0] < steps["start_s"][0]
        epochs = [mark.start_s for mark in marks if mark.kind == "epoch"]
        assert len(epochs) == 2
        assert steps["start_s"][9] < epochs[0] < steps["start_s"][10], "an epoch has ten steps"
        (evaluation,) = [mark for mark in marks if mark.kind == "evaluation"]
        assert last_s < evaluation.start_s < evaluation.end_s <= times[-1]


def test_exactly_the_steps_asked_for_are_profiled_on_every_rank(done: Done) -> None:
    assert list(done.record.profiles) == [0, 1]
    for rank, profile in done.record.profiles.items():
        assert (profile.first_step, profile.last_step) == (PROFILED[0], PROFILED[-1])
        calls = {operator.name: operator.calls for operator in profile.operators}
        assert calls["aten::convolution_backward"] == CONVOLUTIONS
        own_s = sum(operator.self_cpu_s for operator in profile.operators)
        assert 0 < own_s < 1.5 * profile.step_s
        assert (done.record.path / f"profile-{rank}.trace.json.gz").stat().st_size > 1000


def test_the_time_of_profiled_steps_does_not_count(done: Done) -> None:
    windows = windows_of(done.record)
    assert [(window.steps, window.profiled) for window in windows] == [(5, False), (3, False), (2, True), (5, False)]
    assert done.record.summary is not None
    assert done.record.summary.step_s == step_time(windows) == np.median([w.wall_s / w.steps for w in windows[1::2]])
    counted = np.isin(np.arange(WARM_UP, STEPS), PROFILED, invert=True)
    for rank, steps in done.record.steps.items():
        mean_s = steps.total_s[WARM_UP:][counted].mean()
        assert done.record.summary.ranks[rank].step_s == pytest.approx(mean_s, rel=1e-6)
        assert done.record.summary.ranks[rank].split.step_s == pytest.approx(mean_s, rel=1e-3)


def test_the_terminal_says_it(done: Done) -> None:
    heading, first = done.process.stdout.splitlines()[:2]
    assert heading.split()[-2:] == ["CPU", "memory"]
    assert first.split()[-1] == "MB"
    assert "aten::convolution_backward" in done.process.stdout
    assert "steps 8–9 of rank 0 ran under torch's profiler" in done.process.stdout
    assert "the host's cores were busy" in done.process.stdout


def test_tensorboard_has_what_the_record_has(done: Done) -> None:
    record, scalars = done.record, done.scalars(0)
    assert record.summary is not None
    losses = losses_of(record)
    assert scalars["loss/train"] == {step: pytest.approx(loss) for step, loss in enumerate(losses, start=1)}
    assert scalars["loss/test"] == {STEPS: pytest.approx(record.summary.test.loss)}
    assert scalars["accuracy/test"] == {STEPS: pytest.approx(record.summary.test.accuracy)}
    logs = record.events_of(LogEvent)
    assert scalars["accuracy/train"] == {e.step: pytest.approx((e.correct or 0) / e.samples) for e in logs}
    speeds = {e.step: pytest.approx(e.samples / e.wall_s, rel=1e-4) for e in logs if not e.profiled}
    assert scalars["speed/samples_per_s"] == speeds


def test_tensorboard_has_every_ranks_resources_and_split(done: Done) -> None:
    parts = [f"split/{part}_s" for part in ("compute", "overlapped", "exposed", "other")]
    for rank in (0, 1):
        scalars = done.scalars(rank)
        assert scalars.keys() >= {"resources/cpu_percent", "resources/resident_mb", *parts}
        assert all(50 < value < 2000 for value in scalars["resources/resident_mb"].values())
        assert all(value >= 0 for value in scalars["resources/cpu_percent"].values())
        # The parts of the time split add up to the window's steps.
        total_s = done.record.steps[rank].total_s
        together = sum(scalars[part][STEPS] for part in parts)
        assert together == pytest.approx(total_s[10:].mean(), rel=0.02)
    assert done.scalars(1).keys() == {"resources/cpu_percent", "resources/resident_mb", *parts}

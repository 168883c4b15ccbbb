"""The recorder of steps on a device that runs behind: what is written, and when it waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from device_clock import DeviceClock
from paceline.measure.operations import OperationLog
from paceline.measure.steps import BACKWARD, DATA, FORWARD, OPTIMISER, Stopwatch
from paceline.records import RunFolder, StepWriter
from paceline.records.reader import Steps, read_steps
from paceline.records.timeline import TimelineWriter, read_timeline
from paceline.training.recording import step_recorder
from paceline.training.recording.step_recorder import StepRecorder

MARKS = 6
"""Marks of each step here: its start, four phases and the start of the optimiser."""


class Recorded:
    """A recorder on a simulated device."""

    def __init__(self, folder: Path) -> None:
        self.clock = DeviceClock()
        self.stopwatch = Stopwatch(self.clock, OperationLog(self.clock))
        self._folder = RunFolder.create(folder)
        self._writer, self._timeline = StepWriter(self._folder, 0), TimelineWriter(folder, 0)
        self.recorder = StepRecorder(self.stopwatch, self._writer, self._timeline)

    def train(self, losses: list[tuple[float, object]], correct: list[object]) -> None:
        """Record a step with these losses, each with its weight, and counts."""
        self.stopwatch.begin()
        for phase in (DATA, FORWARD, BACKWARD):
            self.stopwatch.lap(phase)
        self.stopwatch.mark_agreed()
        self.stopwatch.lap(OPTIMISER)
        self.recorder.add_samples(4)
        for weight, loss in losses:
            self.recorder.add_figures(loss, weight, None)  # type: ignore[arg-type]
        for count in correct:
            self.recorder.add_figures(None, 0, count)  # type: ignore[arg-type]
        self.recorder.end_step(0, self.stopwatch.end())

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._timeline.close()

    @property
    def steps(self) -> Steps:
        """Steps on disk."""
        return read_steps(self._folder.path / "rank-0.csv")

    @property
    def timeline_steps(self) -> list[int]:
        """Steps in the timeline on disk."""
        return [int(step) for step in read_timeline(self._folder.path / "timeline-0.bin").steps["step"]]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    with closing(Recorded(tmp_path / "run")) as found:
        yield found


def test_a_step_is_the_weighted_mean_of_its_parts(recorded: Recorded) -> None:
    half = torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)
    recorded.train([(1, half), (3, 2.5)], [torch.tensor(2), 1])
    recorded.train([], [])
    recorded.train([(4, torch.tensor(float("nan")))], [torch.tensor(0)])
    recorded.train([(4, torch.tensor(1 / 3, dtype=torch.float64))], [torch.tensor(True), torch.tensor(3)])
    recorded.recorder.flush()
    steps = recorded.steps
    assert list(steps["loss"]) == pytest.approx([2.0, float("nan"), float("nan"), 0.333333333], nan_ok=True, abs=0)
    assert list(steps["correct"]) == [3, -1, 0, 4]
    assert list(steps["step"]) == [0, 1, 2, 3]
    assert recorded.clock.waits == [4 * MARKS], "one wait for all steps"


def test_only_completed_steps_are_written_in_the_middle_of_a_window(recorded: Recorded) -> None:
    with patch.object(step_recorder, "FLUSH_EVERY_S", 0.0):
        recorded.train([(1, 0.0)], [])
        recorded.clock.reached = MARKS
        recorded.train([(1, 1.0)], [])
        assert list(recorded.steps["loss"]) == [0.0]
        assert recorded.timeline_steps == [0]
        recorded.clock.reached = 2 * MARKS + 3
        recorded.train([(1, 2.0)], [])
        assert list(recorded.steps["loss"]) == [0.0, 1.0]
        assert recorded.clock.reached == 2 * MARKS + 3, "nothing waited for the step in progress"
    recorded.recorder.flush()
    assert list(recorded.steps["loss"]) == [0.0, 1.0, 2.0]
    assert list(recorded.steps["step"]) == [0, 1, 2]
    assert recorded.timeline_steps == [0, 1, 2]
    assert recorded.recorder.step == 3

"""Write a run's figures for TensorBoard while it trains. All runs use the same tags, so that they can be overlaid."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch

from paceline.analysis.steps.split import PARTS, mean_split, split_steps
from paceline.errors import PacelineError
from paceline.measure.clock import Clock
from paceline.measure.resources import ProcessProbe
from paceline.records import RunFolder
from paceline.records.events import EvaluationEvent, LogEvent, RunEvent
from paceline.records.schema import TENSORBOARD_FOLDER
from paceline.records.summary import Split
from paceline.records.timeline import HEADER, ROW, Timeline, timeline_file

FLUSH_S = 5
"""Longest time until a figure is on disk, where TensorBoard reads it."""
MAX_STEPS_SPLIT = 20
"""Time splits are computed for the last steps of a window: enough for a mean, without delaying the next window."""


def check_tensorboard() -> None:
    """Raise if the package tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise PacelineError(
            "--tensorboard needs the package tensorboard, which is not installed.",
            hint="pip install 'paceline[tensorboard]', or omit --tensorboard: the record contains the same figures",
        )


class TensorBoardWriter:
    """Listener to the events of a run. Rank 0 writes the global figures, every rank its own CPU and memory."""

    def __init__(self, folder: RunFolder, rank: int, clock: Clock, device: torch.device) -> None:
        # Imported here: it is slow to import and an optional dependency.
        from torch.utils.tensorboard import SummaryWriter

        self._rank = rank
        self._clock = clock
        self._writer = SummaryWriter(str(folder.path / TENSORBOARD_FOLDER / f"rank-{rank}"), flush_secs=FLUSH_S)
        self._probe = ProcessProbe(device, with_host=False)
        self._before = self._probe.read(clock.now(), 0.0)
        self._timeline = TimelineTail(folder.path / timeline_file(rank))
        self._step = 0

    def on_event(self, event: RunEvent) -> None:
        """Write the figures of an event for which TensorBoard has a plot."""
        if isinstance(event, LogEvent):
            self._on_log(event)
        elif isinstance(event, EvaluationEvent) and self._rank == 0:
            step = self._step if event.step is None else event.step
            self._add("loss/test", event.test.loss, step)
            self._add("accuracy/test", event.test.accuracy, step)

    def add_split(self, step: int, split: Split) -> None:
        """Write the time split of a step."""
        for part in PARTS:
            self._add(f"split/{part}_s", getattr(split, f"{part}_s"), step)

    def close(self) -> None:
        """Write buffered figures and close the file."""
        self._writer.close()

    def _on_log(self, event: LogEvent) -> None:
        self._step = step = event.step
        if self._rank == 0:
            for at, loss in enumerate(event.losses, start=step - len(event.losses) + 1):
                self._add("loss/train", loss, at)
            self._add("accuracy/train", None if event.correct is None else event.correct / event.samples, step)
            self._add("lr", event.lr, step)
            if event.noise is not None:
                self._add("noise/trace", event.noise.trace, step)
                self._add("noise/gradient_sq", event.noise.gradient_sq, step)
            if not event.profiled:
                self._add("speed/samples_per_s", event.samples / event.wall_s, step)
        self._add_resources(step)
        split = mean_split([found.split for found in split_steps(self._timeline.new_steps())[-MAX_STEPS_SPLIT:]])
        if split is not None and not event.profiled:
            self.add_split(step, split)

    def _add_resources(self, step: int) -> None:
        now = self._probe.read(self._clock.now(), 0.0)
        passed_s = now.time_s - self._before.time_s
        if passed_s > 0:
            self._add("resources/cpu_percent", 100 * (now.cpu_s - self._before.cpu_s) / passed_s, step)
        self._add("resources/resident_mb", now.resident_bytes / 1e6, step)
        if now.device_bytes is not None:
            self._add("resources/device_mb", now.device_bytes / 1e6, step)
        self._add("resources/gpu_percent", None if now.gpu_busy is None else 100 * now.gpu_busy, step)
        self._add("resources/gpu_watts", now.gpu_power_w, step)
        self._before = now

    def _add(self, tag: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(tag, value, step)


class TimelineTail:
    """Reader of the new rows of a timeline. Between windows no operation is in progress, so none is split."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = len(HEADER)

    def new_steps(self) -> Timeline:
        """Return the rows written since the last call; none if events are not collected."""
        if not self._file.is_file():
            return Timeline(np.empty(0, ROW))
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            content = stream.read()
        whole = len(content) // ROW.itemsize
        self._offset += whole * ROW.itemsize
        rows = np.frombuffer(content, dtype=ROW, count=whole)
        return Timeline(rows[np.argsort(rows["start_s"], kind="stable")])

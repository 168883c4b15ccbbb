"""Tests of the TensorBoard writer for runs with incomplete figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.measure.clock import HostClock
from paceline.records import RunFolder
from paceline.records.events import EvaluationEvent, LogEvent, RunEvent, StartEvent
from paceline.records.summary import EvaluationResult, Split
from paceline.training.recording.tensorboard import TensorBoardWriter

WINDOW: dict[str, Any] = {"epoch": 0, "samples": 32, "correct": None, "wall_s": 0.5}


def scalars_after(folder: Path, rank: int, *events: RunEvent) -> dict[str, dict[int, float]]:
    """Return the scalars written for some events, without a timeline."""
    scalars = TensorBoardWriter(RunFolder(folder), rank, HostClock(), torch.device("cpu"))
    for event in events:
        scalars.on_event(event)
    scalars.add_split(9, Split(1.0, 0.25, 0.5, 0.125, 0.125, 0.0, None))
    scalars.close()
    scalars.close()
    accumulator = EventAccumulator(str(folder / "tensorboard" / f"rank-{rank}"))
    accumulator.Reload()
    return {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


def test_what_is_not_known_has_no_point(tmp_path: Path) -> None:
    found = scalars_after(
        tmp_path,
        0,
        StartEvent(steps=7, steps_per_epoch=None, dropped=0),
        LogEvent(**(WINDOW | {"step": 4, "losses": [2.5, 1.5, math.nan, math.inf], "lr": 0.5})),
        EvaluationEvent(step=4, epoch=0, test=EvaluationResult(loss=0.875, accuracy=0.5, samples=8, available=8)),
        LogEvent(**(WINDOW | {"step": 7, "losses": [0.5] * 3, "correct": 8, "profiled": True})),
        EvaluationEvent(test=EvaluationResult(loss=0.75, accuracy=None, samples=8, available=8)),
    )
    assert found["loss/train"] == {1: 2.5, 2: 1.5, 5: 0.5, 6: 0.5, 7: 0.5}
    assert found["speed/samples_per_s"] == {4: 64}, "the speed of profiled steps is not one"
    assert found["accuracy/train"] == {7: 0.25}
    assert found["loss/test"] == {4: 0.875, 7: 0.75}
    assert found["accuracy/test"] == {4: 0.5}, "the workload defines none at step 7"
    assert found["lr"] == {4: 0.5}
    assert found["resources/resident_mb"].keys() == {4, 7}
    assert found["split/overlapped_s"] == {9: 0.5}


@pytest.mark.parametrize("rank", [1, 10])
def test_other_ranks_tell_of_themselves_only(tmp_path: Path, rank: int) -> None:
    found = scalars_after(
        tmp_path,
        rank,
        LogEvent(**(WINDOW | {"step": 1, "losses": [2.5]})),
        EvaluationEvent(test=EvaluationResult(loss=0.75, accuracy=0.5, samples=8, available=8)),
    )
    assert {tag.partition("/")[0] for tag in found} == {"resources", "split"}

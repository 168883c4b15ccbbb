"""Tests of the live display of a race."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from paceline.config import RunConfig
from paceline.records import EventWriter, RunFolder, StepRow, StepWriter
from paceline.records.events import CompilingEvent, EvaluationEvent, LogEvent, StartEvent
from paceline.records.experiment.design import RaceDesign
from paceline.records.summary import EvaluationResult
from paceline.report.live.race_table import RaceLiveTable
from report.live.test_live_table import FakeRun, until
from run_models import DESIGN

RACE = RaceDesign(
    **DESIGN | {"repeats": 3, "max_repeats": 3, "reference": "ddp", "batch": 64, "ranks_per_host": 2},
    target_accuracy=0.9,
    eval_every="epoch",
    tta="none",
    seed=0,
)


def follow_one_run(path: Path, *, terminal: bool) -> str:
    """Return the output while a run starts, compiles, trains two steps of four and is tested."""
    stream = io.StringIO()
    shown = RaceLiveTable(Console(file=stream, force_terminal=terminal, width=120, color_system=None))
    shown.plan(RACE, ["ddp"], RunConfig(epochs=2))
    with shown.launch("repeat 1", [FakeRun("ddp", path)], None):
        folder = RunFolder.create(path)
        events, steps = EventWriter(folder, lambda: 1.5), StepWriter(folder, 0)
        if terminal:
            until(lambda: "starting ranks" in stream.getvalue())
        events.write(CompilingEvent())
        if terminal:
            until(lambda: "compiling" in stream.getvalue())
        events.write(StartEvent(steps=4, steps_per_epoch=2, dropped=0, start_up_s=5.0))
        steps.write([StepRow(step, 0, 4, 0.0, 0.1, 0.1, 0.1, 0.1, 2.0, 1) for step in range(2)])
        if terminal:
            until(lambda: "2/4" in stream.getvalue())
        events.write(LogEvent(epoch=0, step=2, wall_s=0.1, losses=[1.0, 1.0], samples=8, correct=4, lr=0.25))
        test = EvaluationResult(loss=0.5, accuracy=0.8, samples=10, available=10)
        events.write(EvaluationEvent(test=test, step=2, epoch=0))
        until(lambda: "80.00%" in stream.getvalue())
        events.close()
        steps.close()
    return stream.getvalue()


def test_a_terminal_shows_what_a_run_does_between_evaluations(tmp_path: Path) -> None:
    output = follow_one_run(tmp_path / "run", terminal=True)
    for words in ("run 1 of 3: starting ranks", "run 1 of 3: compiling", "run 1 of 3: training", "2/4"):
        assert words in output, words


def test_without_a_terminal_there_is_a_row_per_evaluation_only(tmp_path: Path) -> None:
    lines = follow_one_run(tmp_path / "run", terminal=False).splitlines()
    assert lines[-3:] == [
        "run 1 of 3",
        "epoch  rank  validation loss  validation accuracy  learning rate  wall time",
        "    1   all           0.5000               80.00%           0.25     5.00 s",
    ]

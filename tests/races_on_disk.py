"""Write races to disk without training, with numbers that can be checked by hand.

A run is tested after each of three windows of 10 steps, of an epoch each. A window takes `window_s`, an evaluation
0.5 s. The ranks were launched 4 s before training starts, of which compiling takes `compile_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.records import EventWriter, RunFolder
from paceline.records.description import RunDescription
from paceline.records.events import EndEvent, EvaluationEvent, InterruptedEvent, LogEvent, ScheduledEvent, StartEvent
from paceline.records.experiment.design import Candidate, RaceDescription, RaceDesign
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.schema import MARKS_HEADER, MarkRow, marks_file
from paceline.records.summary import EvaluationResult
from run_models import DESIGN, PROVENANCE, summary, topology

STEPS = 10
EVALUATION_S, START_UP_S = 0.5, 4.0
RISING, FLAT = (0.5, 0.8, 0.95), (0.5, 0.6, 0.7)
"""Test accuracies of a run that reaches 90% in its third window, and of one that never does."""


def write_race(
    path: Path,
    windows_s: Sequence[float],
    accuracies: Sequence[Sequence[float]] | None = None,
    *,
    planned: int | None = None,
    interrupted: bool = False,
    compile_s: float | None = None,
    target: float = 0.9,
    cpu: str = "a processor",
    settings: dict[str, Any] | None = None,
    ranks: int = 2,
    torch: str = "2.13.0",
    start_up_parts_s: dict[str, float] | None = None,
) -> Path:
    """Write a race with one run per time of a window, as `paceline race` does."""
    config = RunConfig(epochs=3, eval_every="epoch", target=target, **settings or {})
    design = RaceDesign(
        **DESIGN
        | {"repeats": planned or len(windows_s), "max_repeats": planned or len(windows_s), "proof": False}
        | {"ranks": ranks, "ranks_per_host": ranks, "reference": "ddp", "batch": config.batch or 64},
        target_accuracy=target,
        eval_every="epoch",
        tta=config.tta,
        seed=0,
    )
    about = msgspec.structs.replace(
        PROVENANCE, command="paceline race", cpu=cpu, versions={"paceline": "0.1.0", "torch": torch}
    )
    description = RaceDescription(
        kind="race", candidates=[Candidate("ddp", "ddp")], config=asdict(config), design=design, provenance=about
    )
    folder = ExperimentFolder.create(path, description)
    events = EventWriter(folder)
    for number, window_s in enumerate(windows_s):
        where = f"repeat-{number + 1}/1-ddp"
        events.write(ScheduledEvent(candidate="ddp", repeat=number, folder=where))
        own = asdict(config) | {"seed": number}
        is_last = interrupted and number == len(windows_s) - 1
        _write_run(
            path / where,
            own,
            window_s,
            (accuracies or [RISING] * len(windows_s))[number],
            compile_s,
            ranks,
            is_last,
            start_up_parts_s,
        )
    events.write(InterruptedEvent() if interrupted else EndEvent())
    events.close()
    folder.close()
    return path


def _write_run(
    path: Path,
    config: dict[str, Any],
    window_s: float,
    accuracies: Sequence[float],
    compile_s: float | None,
    ranks: int,
    is_interrupted: bool,
    start_up_parts_s: dict[str, float] | None,
) -> None:
    folder = RunFolder.create(path)
    own = topology(ranks, batch=config["batch"] or 64)
    folder.write_run(RunDescription(config=config, topology=own, provenance=PROVENANCE))
    clock = [0.0]
    events = EventWriter(folder, lambda: clock[0])
    start = StartEvent(
        steps=30,
        steps_per_epoch=10,
        dropped=0,
        start_up_s=START_UP_S,
        compile_s=compile_s,
        start_up_parts_s=start_up_parts_s,
    )
    events.write(start)
    marks = []
    for number, accuracy in enumerate(accuracies):
        done = STEPS * (number + 1)
        clock[0] += window_s
        events.write(
            LogEvent(epoch=number, step=done, wall_s=window_s, losses=[1.0] * STEPS, samples=640, correct=9, lr=0.1)
        )
        marks.append(MarkRow("evaluation", clock[0], clock[0] + EVALUATION_S, "").to_csv())
        clock[0] += EVALUATION_S
        test = EvaluationResult(loss=1 - accuracy, accuracy=accuracy, samples=1000, available=1000)
        events.write(EvaluationEvent(test=test, step=done, epoch=number))
    (path / marks_file(0)).write_text(MARKS_HEADER + "".join(marks))
    if not is_interrupted:
        events.write(EndEvent())
        folder.write_summary(summary(ranks))
        folder.mark_finished()
    events.close()

"""A small record that tests write, truncate and read."""

from __future__ import annotations

from pathlib import Path

from paceline.records import EventWriter, RunDescription, RunFolder, StepRow, StepWriter
from paceline.records.events import EndEvent, LogEvent, StartEvent
from run_models import PROVENANCE, recorded_settings, summary, topology

ROWS = [
    StepRow(0, 0, 22, 0.001, 0.0005, 0.01, 0.02, 0.003, 2.302585093, 3),
    StepRow(1, 0, 21, 0.035, 0.0004, 0.011, 0.021, 0.004, 2.25, 5),
    StepRow(2, 1, 22, 0.072, 0.0006, 0.012, 0.022, 0.005, float("nan"), -1),
]


def write_record(path: Path, *, finished: bool = True) -> RunFolder:
    """Write the steps of two ranks, three events and, for a finished run, a summary."""
    folder = RunFolder.create(path)
    config, ranks = recorded_settings(batch=64), topology(world_size=11)
    folder.write_run(RunDescription(config=config, topology=ranks, provenance=PROVENANCE))
    for rank in range(2):
        steps = StepWriter(folder, rank)
        steps.write(ROWS[:1])
        steps.write(ROWS[1:])
        steps.close()
    events = EventWriter(folder)
    events.write(StartEvent(steps=3, steps_per_epoch=None, dropped=0))
    events.write(LogEvent(epoch=0, step=2, wall_s=0.1, losses=[1.5, 2.5], samples=43, correct=None))
    events.write(EndEvent())
    events.close()
    if finished:
        folder.write_summary(summary(steps=3))
        folder.mark_finished()
    return folder

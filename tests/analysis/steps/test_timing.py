"""Selection of the windows and steps whose times count."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.analysis.steps.timing import (
    WindowTime,
    WindowTotals,
    counted_steps,
    profiled_steps,
    step_time,
    windows_of,
)
from paceline.records import EventWriter, RunDescription, RunFolder, read_run
from paceline.records.events import LogEvent
from run_models import PROVENANCE, recorded_settings, topology

WINDOWS = [WindowTime(2, 9.0), WindowTime(2, 2.0), WindowTime(1, 7.0, profiled=True), WindowTime(2, 4.0)]


def test_the_first_window_and_profiled_ones_do_not_count() -> None:
    assert step_time(WINDOWS) == 1.5
    assert step_time(WINDOWS[:1]) is None
    assert step_time([WINDOWS[0], WINDOWS[2]]) is None


def test_totals_of_windows() -> None:
    totals = WindowTotals()
    assert (totals.steps, totals.wall_s, totals.step_s, totals.last) == (0, 0.0, None, None)
    for window in WINDOWS:
        totals.add(window)
    assert (totals.steps, totals.wall_s, totals.step_s, totals.last) == (7, 22.0, 1.5, WINDOWS[-1])
    assert totals.profiled_steps == {4}


def test_steps_of_profiled_windows_and_of_the_warm_up_do_not_count() -> None:
    later = [*WINDOWS, WindowTime(2, 4.0, profiled=True), WindowTime(1, 2.0)]
    assert counted_steps(later, 10).tolist() == [False] * 5 + [True, True, False, False, True]


def test_in_a_short_run_all_steps_but_the_first_count() -> None:
    assert counted_steps(WINDOWS, 5).tolist() == [False, True, True, True, False]
    assert profiled_steps(WINDOWS) == {4}
    assert counted_steps(WINDOWS, 3).tolist() == [False, True, True]
    assert counted_steps([], 3).tolist() == [False, True, True]
    assert counted_steps(WINDOWS, 0).tolist() == []


def test_profiled_windows_are_marked_in_the_record(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_run(RunDescription(config=recorded_settings(), topology=topology(), provenance=PROVENANCE))
    events = EventWriter(folder)
    for window in WINDOWS:
        losses: list[float | None] = [1.0] * window.steps
        log = LogEvent(epoch=0, step=0, wall_s=window.wall_s, losses=losses, samples=1, correct=None)
        events.write(msgspec.structs.replace(log, profiled=window.profiled))
    events.close()
    assert windows_of(read_run(tmp_path)) == WINDOWS

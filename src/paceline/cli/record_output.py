"""Show the progress of a command that writes one record, and say where the record is after an interrupt."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.cli.interrupts import CtrlCHandler

if TYPE_CHECKING:
    from paceline.experiments.train import FollowRun
    from paceline.launch.launcher_process import Notify
    from paceline.report.live.run import FolderFollower

Result = TypeVar("Result")


def run_with_display(
    run: Callable[[FollowRun], Result | None],
    make_display: Callable[[Path], FolderFollower],
    ctrl_c: CtrlCHandler,
    notify: Notify,
) -> Result | None:
    """Call `run` with a function that opens the display of its record; return its result.

    Return None after Ctrl-C, when the record is incomplete, and on hosts that have no record. Ctrl-C before there is a
    record raises KeyboardInterrupt. Ctrl-C after the run is only recorded, so that the result can be printed.
    """
    displays: list[FolderFollower] = []

    def follow(folder: Path) -> FolderFollower:
        displays.append(make_display(folder))
        return displays[-1]

    try:
        with ctrl_c.errors_are_interrupts():
            result = run(follow)
        ctrl_c.defer()
    except KeyboardInterrupt:
        if not displays:
            raise
        from paceline.records.schema import CHECKPOINTS_FOLDER

        folder = displays[0].folder
        notify(f"interrupted; the record so far is in {folder}")
        if any((folder / CHECKPOINTS_FOLDER).glob("step-*")):
            notify(f"go on with: paceline train --resume --out {shlex.quote(str(folder))}")
        return None
    finally:
        for display in displays:
            display.close()
    return result

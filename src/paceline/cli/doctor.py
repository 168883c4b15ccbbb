"""`paceline doctor`: checks machines, hosts and the link between ranks before a run."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.interrupts import CtrlC
from paceline.cli.messages import data_console
from paceline.cli.options import takes
from paceline.config import EXAMINED_SETTINGS, LaunchConfig, RunConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, PROBLEM_EXIT_CODE

NOT_ASKED = frozenset(field.name for field in fields(RunConfig)) - frozenset(EXAMINED_SETTINGS)


@takes(RunConfig, LaunchConfig, hidden=NOT_ASKED)
def command(
    run: RunConfig,
    launch: LaunchConfig,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder of what is found [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead of tables.")] = False,
) -> int:
    """Check machines, hosts and the link before a run, and say what to mend.

    Ranks start as for a run, on this host or on all hosts of a launch: each tells of its machine, they measure latency,
    bandwidth and all-reduces between them, and train a few steps of the workload to see what it needs. Leaves with
    exit code 9 when something has to be mended.
    """
    from paceline.analysis.findings import findings, problems
    from paceline.cli.messages import messages, notifier
    from paceline.experiments.doctor import doctor
    from paceline.records.schema import DOCTOR_FILE
    from paceline.records.writer import strict
    from paceline.report.terminal.doctor import LiveExamination, print_examination, to_json

    console = messages()
    watched: list[LiveExamination] = []

    def watch(folder: Path) -> LiveExamination:
        watched.append(LiveExamination(folder, console))
        return watched[-1]

    with CtrlC() as ctrl_c:
        try:
            result = doctor(run, launch, out, watch, notifier(console))
            ctrl_c.hold()
        except KeyboardInterrupt:
            if not watched:
                raise
            console.print(f"interrupted; what was done is in {watched[0].folder}", markup=False)
            return INTERRUPTED_EXIT_CODE
        finally:
            for display in watched:
                display.close()
        if result is None:
            return 0
        examination, folder = result
        if as_json:
            typer.echo(json.dumps(strict(to_json(examination, folder)), indent=2, allow_nan=False))
        else:
            print_examination(examination, data_console())
            typer.echo(f"record: {folder / DOCTOR_FILE}")
    if ctrl_c.came:
        return INTERRUPTED_EXIT_CODE
    return PROBLEM_EXIT_CODE if problems(findings(examination)) else 0

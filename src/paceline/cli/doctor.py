"""`paceline doctor`: check machines, hosts and the link between ranks before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.messages import data_console
from paceline.cli.options import config_options
from paceline.config import LaunchConfig, RunConfig, settings_unused_by
from paceline.errors import INTERRUPTED_EXIT_CODE, PROBLEM_EXIT_CODE


@config_options(RunConfig, LaunchConfig, hidden=settings_unused_by("doctor"))
def command(
    run: RunConfig,
    launch: LaunchConfig,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder for the record [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> int:
    """Check the machines and the network before a run.

    Starts ranks on all hosts, as for a run. Each rank reports its hardware, software and settings. The ranks then
    measure latency, bandwidth and all-reduces between them, and train a few steps of the workload to measure its
    memory and time. Each problem found is listed with a fix.

    The exit code is 9 if a problem was found.
    """
    from paceline.analysis.findings import findings, problems
    from paceline.cli.messages import message_console, message_printer
    from paceline.experiments.doctor import doctor
    from paceline.records.schema import DOCTOR_FILE
    from paceline.records.writer import json_safe
    from paceline.report.terminal.doctor import LiveExamination, print_examination, to_json

    messages = message_console()
    displays: list[LiveExamination] = []

    def watch(folder: Path) -> LiveExamination:
        displays.append(LiveExamination(folder, messages))
        return displays[-1]

    with CtrlCHandler() as ctrl_c:
        try:
            with ctrl_c.errors_are_interrupts():
                result = doctor(run, launch, out, watch, message_printer(messages))
            ctrl_c.defer()
        except KeyboardInterrupt:
            if not displays:
                raise
            messages.print(f"interrupted; the record so far is in {displays[0].folder}", markup=False)
            return INTERRUPTED_EXIT_CODE
        finally:
            for display in displays:
                display.close()
        if result is None:
            return 0
        examination, folder = result
        if as_json:
            typer.echo(json.dumps(json_safe(to_json(examination, folder)), indent=2, allow_nan=False))
        else:
            print_examination(examination, data_console())
            typer.echo(f"record: {folder / DOCTOR_FILE}")
    if ctrl_c.pressed:
        return INTERRUPTED_EXIT_CODE
    return PROBLEM_EXIT_CODE if problems(findings(examination)) else 0

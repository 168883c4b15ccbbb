"""`paceline doctor`: check machines, hosts and the link between ranks before a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.messages import data_console, message_console, message_printer, print_json
from paceline.cli.record_output import run_with_display
from paceline.cli.requests import LaunchRequest
from paceline.config import settings_unused_by
from paceline.errors import PROBLEM_EXIT_CODE

if TYPE_CHECKING:
    from paceline.records.examination import Examination


@dataclass(frozen=True, kw_only=True)
class DoctorRequest(LaunchRequest):
    """Check the machines and the network before a run.

    Starts ranks on all hosts, as for a run. Each rank reports its hardware, software and settings. The ranks then
    measure latency, bandwidth and all-reduces between them, and train a few steps of the workload to measure its
    memory and time. Each problem found is listed with a fix.

    The exit code is 9 if a problem was found.
    """

    command: ClassVar[str] = "doctor"
    hidden: ClassVar[frozenset[str]] = settings_unused_by("doctor")

    out: Annotated[Path | None, typer.Option(help="Folder for the record [default: a new one under runs/].")] = None

    def carry_out(self) -> int:
        """Examine, then print the findings."""
        from paceline.analysis.findings import findings, problems
        from paceline.experiments.doctor import doctor
        from paceline.report.terminal.doctor import LiveExamination

        messages = message_console()
        notify = message_printer(messages)
        with CtrlCHandler() as ctrl_c:
            examined = run_with_display(
                lambda follow: doctor(self.run, self.launch, self.out, follow, notify),
                lambda folder: LiveExamination(folder, messages),
                ctrl_c,
                notify,
            )
            if examined is not None:
                _print(*examined, as_json=self.as_json)
        if ctrl_c.pressed or examined is None:
            return ctrl_c.exit_code
        return PROBLEM_EXIT_CODE if problems(findings(examined[0])) else 0


def _print(examination: Examination, folder: Path, *, as_json: bool) -> None:
    from paceline.records.schema import DOCTOR_FILE
    from paceline.report.terminal.doctor import print_examination, to_json

    if as_json:
        print_json(to_json(examination, folder))
    else:
        print_examination(examination, data_console())
        typer.echo(f"record: {folder / DOCTOR_FILE}")

"""`paceline train`: train one workload under one strategy."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.messages import data_console, display_console, message_printer, print_json
from paceline.cli.record_output import run_with_display
from paceline.cli.requests import LaunchRequest
from paceline.errors import CheckpointError, DivergenceError, PacelineError, PreemptedError, UsageError

if TYPE_CHECKING:
    from paceline.records import RunRecord


@dataclass(frozen=True, kw_only=True)
class TrainRequest(LaunchRequest):
    """Train a workload under one strategy and write a record.

    Prints a summary at the end. Ctrl-C stops the run and keeps the record so far. With --checkpoint-every it can be
    resumed from its newest checkpoint.
    """

    command: ClassVar[str] = "train"

    out: Annotated[Path | None, typer.Option(help="Folder for the record [default: a new one under runs/].")] = None
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[latest|auto|PATH]",
            help="Go on from the newest checkpoint in --out, or of the last run under runs/ (latest, also without a "
            "value); the same, but begin if there is none (auto); or from a checkpoint or a run's folder (PATH). "
            "Settings are those of the checkpoint, unless given.",
        ),
    ] = None

    @property
    def words_to_go_on(self) -> tuple[str, ...]:
        from paceline.experiments.resume import AUTO, LATEST

        if self.resume is None:
            return ("--resume", "auto")
        if self.resume not in (AUTO, LATEST) and self.out != Path(self.resume):
            raise UsageError(
                f"--requeue was given with --resume {self.resume}: each time that the job comes back, the run would "
                "begin at that checkpoint again.",
                hint="go on in the run's own folder: --resume latest --out FOLDER; or leave out --requeue",
            )
        return ()

    def check_submitted(self) -> None:
        from paceline.experiments.resume import LATEST

        if self.resume is None:  # The settings of a run that resumes are in its checkpoint.
            super().check_submitted()
        if self.resume == LATEST and self.out is None:
            raise UsageError(
                "--resume latest was given without --out: the job would write to a new folder, which has no "
                "checkpoints.",
                hint="name the folder of the run to go on with: --out FOLDER; or its checkpoint: --resume PATH",
            )

    def carry_out(self) -> int:
        """Train, then print the summary."""
        from paceline.experiments.resume import prepare_resume
        from paceline.experiments.train import train
        from paceline.launch.rank_assignment import find_launcher_process
        from paceline.records import read_run
        from paceline.report.live.run import LiveRun

        messages = display_console()
        notify = message_printer(messages)
        config, launch, out, resume = self.run, self.launch, self.out, None
        if self.resume is not None:
            resumed = prepare_resume(self.run, self.resume, self.out, self.given, notify)
            if resumed is not None and resumed.is_over:
                return 0
            if resumed is not None:
                config, out, resume = resumed.config, resumed.out, resumed.path
                launcher = find_launcher_process(launch, os.environ)
                if not self.given & {"ranks", "ranks_per_host"} and launcher.launchers == 1 and launcher.ranks is None:
                    launch = replace(launch, ranks=resumed.ranks or launch.ranks)
        failure: PacelineError | None = None
        displays: list[LiveRun] = []

        def show(folder: Path) -> LiveRun:
            displays.append(LiveRun(folder, messages))
            return displays[-1]

        with CtrlCHandler() as ctrl_c:
            try:
                record = run_with_display(
                    lambda follow: train(config, launch, out, follow, notify, resume), show, ctrl_c, notify
                )
            except (CheckpointError, DivergenceError, PreemptedError) as error:  # The record has what was trained.
                failure, record = (
                    error,
                    read_run(displays[0].folder) if displays else None,
                )  # Followers have no display.
            if record is not None:
                for warning in _warnings(record):
                    notify(f"warning: {warning}")
                trace_error = _print_summary(record, as_json=self.as_json, trace=config.trace)
                failure = failure or trace_error
        if failure is not None:  # Raised last: the summary does not need the trace.
            raise failure
        return ctrl_c.exit_code


def _warnings(record: RunRecord) -> list[str]:
    """Return the warnings that a run gives reason for."""
    from paceline.analysis.caveats import replica_difference, unplanned_bytes, untracked_traffic

    strategy, summary = record.topology.strategy, record.summary
    found = (
        untracked_traffic(strategy, summary),
        unplanned_bytes(strategy, record),
        replica_difference(strategy, summary),
    )
    return [warning for warning in found if warning is not None]


def _print_summary(record: RunRecord, *, as_json: bool, trace: bool) -> PacelineError | None:
    """Write the trace and print the summary; return the error of the trace, if there is one."""
    from paceline.report.terminal.run import print_run
    from paceline.report.trace import format_trace_paths, write_traces

    traces: list[Path] = []
    failure: PacelineError | None = None
    try:
        traces = write_traces([record]) if trace else []
    except PacelineError as error:
        failure = error
    if as_json:
        print_json(_to_json(record, traces))
        return failure
    print_run(record, data_console())
    if traces:
        typer.echo(format_trace_paths(traces))
    return failure


def _to_json(record: RunRecord, traces: list[Path]) -> dict[str, object]:
    import msgspec

    from paceline.analysis.caveats import over_subscription
    from paceline.analysis.summary import summarise
    from paceline.analysis.traffic.payload import payload_of
    from paceline.report.tables.json_rows import run_json

    payload = payload_of(record)
    return {
        "record": str(record.path),
        "trace": str(traces[0]) if traces else None,
        "warnings": [*filter(None, [over_subscription(record)]), *_warnings(record)],
        **msgspec.to_builtins(summarise(record)),
        **run_json(record),
        "payload": None if payload is None else payload.to_dict(),
    }

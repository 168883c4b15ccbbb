"""`paceline train`: train one workload under one strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.messages import data_console, message_printer
from paceline.cli.options import config_options
from paceline.config import LaunchConfig, RunConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError


@config_options(RunConfig, LaunchConfig)
def command(
    run: RunConfig,
    launch: LaunchConfig,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder for the record [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> int:
    """Train a workload under one strategy and write a record.

    Prints a summary at the end. Ctrl-C stops the run and keeps the record so far.
    """
    import msgspec
    from rich.console import Console

    from paceline.analysis.caveats import unplanned_bytes, untracked_traffic
    from paceline.analysis.summary import summarise
    from paceline.analysis.traffic.payload import payload_of
    from paceline.experiments.train import train
    from paceline.report.live.run import LiveRun
    from paceline.report.tables.resources import run_json
    from paceline.report.terminal.run import print_run
    from paceline.report.trace import format_trace_paths, write_traces

    messages = Console(stderr=True)
    print_message = message_printer(messages)
    displays: list[LiveRun] = []

    def watch(folder: Path) -> LiveRun:
        displays.append(LiveRun(folder, messages))
        return displays[-1]

    with CtrlCHandler() as ctrl_c:
        try:
            with ctrl_c.errors_are_interrupts():
                record = train(run, launch, out, watch, print_message)
            ctrl_c.defer()
        except KeyboardInterrupt:
            if not displays:
                raise
            print_message(f"interrupted; the record so far is in {displays[0].folder}")
            return INTERRUPTED_EXIT_CODE
        finally:
            for display in displays:
                display.close()
        if record is None:
            return 0
        for warning in (untracked_traffic(run.strategy, record.summary), unplanned_bytes(run.strategy, record)):
            if warning is not None:
                print_message(f"warning: {warning}")
        traces: list[Path] = []
        failure: PacelineError | None = None
        try:
            traces = write_traces([record]) if run.trace else []
        except PacelineError as error:
            failure = error
        if as_json:
            files = {"record": str(record.path), "trace": str(traces[0]) if traces else None}
            payload = payload_of(record)
            payload_json = {"payload": None if payload is None else payload.to_dict()}
            summary = msgspec.to_builtins(summarise(record))
            typer.echo(json.dumps({**files, **summary, **run_json(record), **payload_json}, indent=2))
        else:
            print_run(record, data_console())
            if traces:
                typer.echo(format_trace_paths(traces))
    if failure is not None:  # Raised last: the summary does not need the trace.
        raise failure
    return INTERRUPTED_EXIT_CODE if ctrl_c.pressed else 0

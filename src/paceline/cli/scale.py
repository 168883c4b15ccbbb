"""`paceline scale`: strategies over numbers of ranks, strong and weak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.interrupts import held_back
from paceline.cli.messages import data_console, sayer, show_error
from paceline.cli.options import takes
from paceline.config import LaunchConfig, RunConfig, ScaleConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.analysis.scaling import Scaling

HELP = {
    "steps": "Steps of every run [default: 20, unless --epochs is given].",
    "epochs": "Train every run for whole epochs instead.",
    "lr": "Learning rate of SGD, the same whatever the batch: this is about time.",
    "threads": "CPU threads per rank [default: usable cores ÷ ranks on the host; on one machine the same for all].",
}
NOT_ASKED = frozenset({"strategy", "evaluate", "eval_ranks"})


@takes(ScaleConfig, RunConfig, LaunchConfig, without=NOT_ASKED, help_texts=HELP)
def command(
    config: ScaleConfig,
    run: RunConfig,
    launch: LaunchConfig,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder of the records [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> int:
    """Scale strategies over numbers of ranks: time, speed-up and efficiency against one process and themselves.

    Strong scaling keeps the global batch, weak scaling the batch per rank. Every strategy is measured on one rank too.
    Ctrl-C ends it early, and reports what was measured until then.
    """
    from rich.console import Console

    from paceline.experiments.scale import scale
    from paceline.report.scaling_board import ScaleBoard

    messages = Console(stderr=True, highlight=False)
    folders: list[Path] = []
    failure: PacelineError | None = None
    interrupted = False
    try:
        scale(run, launch, config, out, ScaleBoard(messages), folders.append, sayer(messages))
    except KeyboardInterrupt:
        if not folders:
            raise
        interrupted = True
    except PacelineError as error:
        if not folders:
            raise
        failure = error
    if not folders:  # A host that took part, and has nothing to show.
        return 0
    with held_back() as ctrl_c:
        found = _read(folders[0])
        if failure is None or any(row.step_s for row in found.comparison.rows):
            _report(found, folders[0], messages, as_json=as_json, trace=run.trace)
    if failure is not None:  # After the report of what was measured before it.
        raise failure
    return INTERRUPTED_EXIT_CODE if interrupted or ctrl_c.came else 0


def _read(folder: Path) -> Scaling:
    from paceline.analysis.pool import pool
    from paceline.analysis.scaling import scaling
    from paceline.records.experiment import read_experiment

    return scaling(pool([read_experiment(folder)]))


def _report(found: Scaling, folder: Path, messages: Console, *, as_json: bool, trace: bool) -> None:
    """The page and the traces, then the tables or the JSON; what was measured is not lost where one cannot be made."""
    from paceline.records.schema import REPORT_FILE
    from paceline.records.writer import strict
    from paceline.report.scaling import print_report, print_scaling, to_json
    from paceline.report.scaling_page import write_scaling_page
    from paceline.report.trace import where_traces_are, write_traces

    report: Path | None = folder / REPORT_FILE
    traces: list[Path] = []
    try:
        write_scaling_page(found, folder / REPORT_FILE)
    except PacelineError as error:
        show_error(error, messages)
        report = None
    try:
        traces = write_traces(entry.run for entry in found.pool.entries) if trace else []
    except PacelineError as error:
        show_error(error, messages)
    if as_json:
        result = to_json(found) | {"report": report and str(report), "traces": [str(path) for path in traces]}
        typer.echo(json.dumps(strict(result), indent=2, allow_nan=False))
        return
    console = data_console()
    print_scaling(found, console)
    if traces:
        typer.echo(where_traces_are(traces))
    print_report(report, console)

"""`paceline compare`: strategies side by side, the main job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.interrupts import held_back
from paceline.cli.messages import data_console, sayer, show_error
from paceline.cli.options import takes
from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError

if TYPE_CHECKING:
    from rich.console import Console

HELP = {
    "steps": "Steps of every run [default: 40, unless --epochs is given].",
    "epochs": "Train every run for whole epochs instead: for losses and accuracies that mean something.",
}


@takes(
    CompareConfig,
    RunConfig,
    LaunchConfig,
    without=frozenset({"strategy"}),
    help_texts=HELP,
)
def command(
    config: CompareConfig,
    run: RunConfig,
    launch: LaunchConfig,
    *,
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder of the records [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> int:
    """Compare strategies: prove that they compute the same, measure them interleaved, say which to pick and why.

    With --script it compares them in a training script of your own, whose arguments follow `--`. Ctrl-C ends it early,
    and reports what was measured until then.
    """
    from rich.console import Console

    from paceline.experiments.compare import compare
    from paceline.report.board import Board

    messages = Console(stderr=True, highlight=False)
    folders: list[Path] = []
    failure: PacelineError | None = None
    interrupted = False
    try:
        compare(run, launch, config, out, Board(messages), folders.append, sayer(messages), context.args)
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
        if failure is None or _is_measured(folders[0]):
            _report(folders[0], messages, as_json=as_json, trace=run.trace)
    if failure is not None:  # After the report of what was measured before it.
        raise failure
    return INTERRUPTED_EXIT_CODE if interrupted or ctrl_c.came else 0


def _is_measured(folder: Path) -> bool:
    from paceline.analysis.comparison import compare as compare_records
    from paceline.analysis.pool import pool
    from paceline.records.experiment import read_experiment

    return any(row.step_s for row in compare_records(pool([read_experiment(folder)])).rows)


def _report(folder: Path, messages: Console, *, as_json: bool, trace: bool) -> None:
    """The page and the traces, then the table or the JSON; what was measured is not lost where one cannot be made."""
    from paceline.analysis.comparison import compare as compare_records
    from paceline.analysis.pool import pool
    from paceline.records.experiment import read_experiment
    from paceline.records.schema import REPORT_FILE
    from paceline.records.writer import strict
    from paceline.report.comparison import print_comparison, print_next, to_json
    from paceline.report.page import write_page
    from paceline.report.trace import where_traces_are, write_traces

    comparison = compare_records(pool([read_experiment(folder)]))
    report: Path | None = folder / REPORT_FILE
    traces: list[Path] = []
    try:
        write_page(comparison, folder / REPORT_FILE)
    except PacelineError as error:
        show_error(error, messages)
        report = None
    try:
        traces = write_traces(entry.run for entry in comparison.pool.entries) if trace else []
    except PacelineError as error:
        show_error(error, messages)
    if as_json:
        result = to_json(comparison) | {"report": report and str(report), "traces": [str(path) for path in traces]}
        typer.echo(json.dumps(strict(result), indent=2, allow_nan=False))
        return
    console = data_console()
    print_comparison(comparison, console)
    if traces:
        typer.echo(where_traces_are(traces))
    print_next(comparison, report, console)

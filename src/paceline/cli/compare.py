"""`paceline compare`: strategies side by side, the main job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.messages import show_error
from paceline.cli.options import takes
from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError


@takes(RunConfig, LaunchConfig, CompareConfig, without=frozenset({"strategy"}))
def command(
    run: RunConfig,
    launch: LaunchConfig,
    config: CompareConfig,
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

    from paceline.analysis.comparison import compare as compare_records
    from paceline.analysis.pool import pool
    from paceline.experiments.compare import compare
    from paceline.records.experiment import is_experiment, read_experiment
    from paceline.records.schema import REPORT_FILE
    from paceline.report.board import Board
    from paceline.report.comparison import print_comparison, print_next, to_json
    from paceline.report.page import write_page

    messages = Console(stderr=True, highlight=False)
    folders: list[Path] = []
    interrupted = False
    try:
        compare(run, launch, config, out, Board(messages), folders.append, context.args)
    except KeyboardInterrupt:
        if not folders or not is_experiment(folders[0]):
            raise
        interrupted = True
    comparison = compare_records(pool([read_experiment(folders[0])]))
    report: Path | None = folders[0] / REPORT_FILE
    try:
        write_page(comparison, folders[0] / REPORT_FILE)
    except PacelineError as error:  # Where the page cannot be drawn, what was measured is not lost.
        show_error(error, messages)
        report = None
    if as_json:
        typer.echo(json.dumps(to_json(comparison) | {"report": report and str(report)}, indent=2))
    else:
        console = Console(width=None if messages.is_terminal else 150)
        print_comparison(comparison, console)
        print_next(comparison, report, console)
    return INTERRUPTED_EXIT_CODE if interrupted else 0

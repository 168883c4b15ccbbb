"""`paceline compare`: measure strategies side by side and recommend one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.experiment_output import run_and_report
from paceline.cli.messages import message_printer
from paceline.cli.options import config_options
from paceline.config import CompareConfig, LaunchConfig, RunConfig, settings_unused_by

HELP_TEXTS = {
    "steps": "Steps of each run [default: 40, unless --epochs or --seconds is given].",
    "epochs": "Train each run for this many epochs instead, to compare final losses and accuracies too.",
}


@config_options(
    CompareConfig,
    RunConfig,
    LaunchConfig,
    without=settings_unused_by("compare"),
    help_texts=HELP_TEXTS,
)
def command(
    config: CompareConfig,
    run: RunConfig,
    launch: LaunchConfig,
    *,
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder for the records [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> int:
    """Compare strategies side by side and recommend one.

    First proves that every strategy computes the same mean gradient. Then measures short runs of all strategies,
    interleaved, until the fastest is clear or --max-repeats is reached. An HTML report explains the differences.

    With --script, the strategies are compared in your own training script; its arguments follow `--`.

    Ctrl-C stops the measurement and reports the runs measured so far.
    """
    from rich.console import Console

    from paceline.experiments.compare import compare
    from paceline.report.live.live_table import LiveTable

    messages = Console(stderr=True, highlight=False)
    display = LiveTable(messages)
    return run_and_report(
        lambda on_folder: compare(
            run, launch, config, out, display, on_folder, message_printer(messages), context.args
        ),
        display,
        messages,
        as_json=as_json,
        trace=run.trace,
    )

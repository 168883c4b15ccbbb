"""`paceline compare`: strategies side by side, the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.experiment_output import carry_out
from paceline.cli.messages import notifier
from paceline.cli.options import takes
from paceline.config import CompareConfig, LaunchConfig, RunConfig

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
    from paceline.report.live.live_table import LiveTable

    messages = Console(stderr=True, highlight=False)
    display = LiveTable(messages)
    return carry_out(
        lambda tell: compare(run, launch, config, out, display, tell, notifier(messages), context.args),
        display,
        messages,
        as_json=as_json,
        trace=run.trace,
    )

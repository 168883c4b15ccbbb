"""`paceline scale`: measure strategies over several world sizes, with strong and weak scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.experiment_output import run_and_report
from paceline.cli.messages import message_printer
from paceline.cli.options import config_options
from paceline.config import LaunchConfig, RunConfig, ScaleConfig, settings_unused_by

HELP_TEXTS = {
    "steps": "Steps of each run [default: 20, unless --epochs or --seconds is given].",
    "epochs": "Train each run for this many epochs instead.",
    "lr": "Learning rate of SGD, the same for every batch size: only times are compared.",
    "threads": "CPU threads per rank [default: usable cores ÷ ranks per host; "
    "on one machine, the same for every world size].",
}


@config_options(ScaleConfig, RunConfig, LaunchConfig, without=settings_unused_by("scale"), help_texts=HELP_TEXTS)
def command(
    config: ScaleConfig,
    run: RunConfig,
    launch: LaunchConfig,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder for the records [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> int:
    """Measure how strategies scale with the number of ranks.

    Reports time per step, speed-up and efficiency, relative to one process without communication and to the same
    strategy on one rank. Strong scaling keeps the global batch fixed, weak scaling the batch per rank.

    Ctrl-C stops the measurement and reports the runs measured so far.
    """
    from rich.console import Console

    from paceline.experiments.scale import scale
    from paceline.report.live.scaling_table import ScalingLiveTable

    messages = Console(stderr=True, highlight=False)
    display = ScalingLiveTable(messages)
    return run_and_report(
        lambda on_folder: scale(run, launch, config, out, display, on_folder, message_printer(messages)),
        display,
        messages,
        as_json=as_json,
        trace=run.trace,
    )

"""`paceline scale`: strategies over numbers of ranks, strong and weak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.experiment_output import carry_out
from paceline.cli.messages import notifier
from paceline.cli.options import takes
from paceline.config import LaunchConfig, RunConfig, ScaleConfig

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
    from paceline.report.live.scaling_table import ScalingLiveTable

    messages = Console(stderr=True, highlight=False)
    display = ScalingLiveTable(messages)
    return carry_out(
        lambda tell: scale(run, launch, config, out, display, tell, notifier(messages)),
        display,
        messages,
        as_json=as_json,
        trace=run.trace,
    )

"""`paceline train`: one run of one workload under one strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.messages import data_console
from paceline.cli.options import takes
from paceline.config import LaunchConfig, RunConfig


@takes(RunConfig, LaunchConfig)
def command(
    run: RunConfig,
    launch: LaunchConfig,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder of the record [default: a new one under runs/].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Train a workload under one strategy, and leave a record of it."""
    from rich.console import Console

    from paceline.analysis.summary import summarise
    from paceline.experiments.train import train
    from paceline.report.live import Live
    from paceline.report.tables import print_run

    messages = Console(stderr=True)
    watched: list[Path] = []

    def watch(folder: Path) -> Live:
        watched.append(folder)
        return Live(folder, messages)

    try:
        record = train(run, launch, out, watch)
    except KeyboardInterrupt:
        if watched:
            messages.print(
                f"interrupted; what was done is in {watched[0]}", markup=False, highlight=False, soft_wrap=True
            )
        raise
    if record is None:
        return
    if as_json:
        typer.echo(json.dumps({"record": str(record.path), **summarise(record)}, indent=2))
    else:
        print_run(record, data_console())

"""`paceline strategies`: what there is, and how each works."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """List the strategies, or explain one.

    The explanation has the idea, who sends what to whom, the cost, the options, and when not to use it.
    """
    from paceline.strategies.registry import ENTRIES, lesson

    if name is None and as_json:
        typer.echo(json.dumps([{"name": e.name, "summary": e.summary} for e in ENTRIES.values()], indent=2))
    elif name is None:
        width = max(map(len, ENTRIES))
        for entry in ENTRIES.values():
            typer.echo(f"{entry.name:<{width}}  {entry.summary}")
        typer.echo("\n`paceline strategies NAME` explains one; options are written as NAME:key=value,key=value")
    elif as_json:
        typer.echo(json.dumps(dataclasses.asdict(lesson(name)), indent=2))
    else:
        explained = lesson(name)
        typer.echo(f"{explained.name}: {explained.summary}\n\n{explained.text}\n\nOptions")
        for option in explained.options:
            typer.echo(f"    {name}:{option.name}={option.default}  ({option.kind})\n        {option.doc}")
        if not explained.options:
            typer.echo("    none")

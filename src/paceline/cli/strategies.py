"""`paceline strategies`: list the strategies, and explain each of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

SYMBOLS = (
    "p is the number of ranks and M the bytes of the gradients, unless stated otherwise; α is the latency of a message,"
    "\nβ the time to send one byte, γ the time to add one byte; lg is log2."
)
"""Symbols in the costs of strategies."""


def command(
    name: Annotated[str | None, typer.Argument(help="Strategy to explain [default: list all].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List the strategies and their sets, or explain one.

    The explanation covers the idea, who sends what to whom, the cost, the options, and when not to use the strategy.
    """
    from paceline.strategies.registry import ENTRIES, SETS, lesson

    if name is None and as_json:
        typer.echo(json.dumps([{"name": e.name, "summary": e.summary} for e in ENTRIES.values()], indent=2))
    elif name is None:
        width = max(map(len, ENTRIES))
        for entry in ENTRIES.values():
            typer.echo(f"{entry.name:<{width}}  {entry.summary}")
        typer.echo("\nSets, for --strategies")
        for set_name, members in SETS.items():
            typer.echo(f"{set_name:<{width}}  {', '.join(members)}")
        typer.echo("\n`paceline strategies NAME` explains a strategy; options are written NAME:key=value,key=value")
    elif as_json:
        typer.echo(json.dumps(dataclasses.asdict(lesson(name)), indent=2))
    else:
        explained = lesson(name)
        typer.echo(f"{explained.name}: {explained.summary}\n\n{explained.text}\n")
        if "α" in explained.text:
            typer.echo(f"{SYMBOLS}\n")
        typer.echo("Options")
        for option in explained.options:
            typer.echo(f"    {name}:{option.name}={option.default}  ({option.kind})\n        {option.doc}")
        if not explained.options:
            typer.echo("    none")

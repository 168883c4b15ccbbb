"""`paceline strategies`: list the strategies, and explain each of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from paceline.cli.messages import print_json
from paceline.cli.requests import Request

if TYPE_CHECKING:
    from paceline.strategies.registry import Lesson

SYMBOLS = (
    "p is the number of ranks and M the bytes of the gradients, unless stated otherwise; α is the latency of a message,"
    "\nβ the time to send one byte, γ the time to add one byte; lg is log2."
)
"""Symbols in the costs of strategies."""


@dataclass(frozen=True, kw_only=True)
class StrategiesRequest(Request):
    """List the strategies and their sets, or explain one.

    The explanation covers the idea, who sends what to whom, the cost, the options, and when not to use the strategy.
    """

    command: ClassVar[str] = "strategies"

    name: Annotated[str | None, typer.Argument(help="Strategy to explain [default: list all].")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False

    def carry_out(self) -> int:
        """Print the list or the explanation."""
        from paceline.strategies.registry import ENTRIES, SETS, lesson

        if self.name is None and self.as_json:
            print_json([{"name": e.name, "summary": e.summary} for e in ENTRIES.values()])
        elif self.name is None:
            width = max(map(len, ENTRIES))
            for entry in ENTRIES.values():
                typer.echo(f"{entry.name:<{width}}  {entry.summary}")
            typer.echo("\nSets, for --strategies")
            for set_name, members in SETS.items():
                typer.echo(f"{set_name:<{width}}  {', '.join(members)}")
            typer.echo("\n`paceline strategies NAME` explains a strategy; options are written NAME:key=value,key=value")
        elif self.as_json:
            print_json(dataclasses.asdict(lesson(self.name)))
        else:
            _print(lesson(self.name))
        return 0


def _print(explained: Lesson) -> None:
    typer.echo(f"{explained.name}: {explained.summary}\n\n{explained.text}\n")
    if "α" in explained.text:
        typer.echo(f"{SYMBOLS}\n")
    typer.echo("Options")
    for option in explained.options:
        typer.echo(f"    {explained.name}:{option.name}={option.default}  ({option.kind})\n        {option.doc}")
    if not explained.options:
        typer.echo("    none")

"""The `paceline` command: parses, calls, and turns every error into one sentence, a hint and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import compare, doctor, report, scale, strategies, submit, train
from paceline.cli.emulation import TYPED
from paceline.cli.interrupts import CtrlC
from paceline.cli.messages import messages, show_error
from paceline.cli.options import PassThroughCommand
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError, UsageError


class Commands(TyperGroup):
    """Group of all commands that raises `Abort` on Ctrl-C: typer would only set the exit code, without a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Trains PyTorch models data-parallel under every way of synchronising gradients, "
    "and tells you which one to pick and why.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("compare", cls=PassThroughCommand)(compare.command)
app.command("train")(train.command)
app.command("scale")(scale.command)
app.command("doctor")(doctor.command)
app.command("report")(report.command)
app.command("strategies")(strategies.command)
app.command("submit", cls=submit.SbatchOptionsCommand)(submit.command)

LEAVE_AFTER_S = 1.0
"""Who leaves it to another process to tell waits this long: launchers may end all processes with the first to leave."""


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(importlib.metadata.version("paceline"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and leaves with an exit code that tells the kind of failure."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Its warnings are for those who build it; we tell errors.
    with CtrlC(then=signal.SIG_DFL) as ctrl_c:  # Ctrl-C during Python's exit shows no traceback.
        try:
            code = run(sys.argv[1:] if arguments is None else arguments)
            ctrl_c.hold()
        except KeyboardInterrupt:  # Outside of the command.
            ctrl_c.hold()
            code = INTERRUPTED_EXIT_CODE
        with suppress(OSError, ValueError):  # Python's exit flushes again and reports the error.
            sys.stdout.flush()
    sys.exit(INTERRUPTED_EXIT_CODE if ctrl_c.came and not code else code)


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code. Errors of ours that a user cannot mend keep their traceback."""
    TYPED.set(arguments)
    try:
        result = app(arguments or ["--help"], standalone_mode=False)
    except PacelineError as error:
        _tell(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        messages().print("interrupted", style="bold")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # A mistake in the command line itself, found by the parser.
        _tell(UsageError(error.format_message(), hint="`paceline --help`, or `paceline COMMAND --help`"))
        return UsageError.exit_code
    return result if isinstance(result, int) else 0


def _tell(error: PacelineError) -> None:
    """Says what went wrong; a mistake that all processes of a launch make is told by the first on each host."""
    if isinstance(error, UsageError) and _another_tells(os.environ):
        time.sleep(LEAVE_AFTER_S)
    else:
        show_error(error, messages())


def _another_tells(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started several processes on this host, and this one is not the first."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return environment.get("LOCAL_RANK", "0") != "0"
    in_step = environment.get("SLURM_STEP_NUM_TASKS") == environment.get("SLURM_NTASKS")
    return in_step and environment.get("SLURM_LOCALID", "0") != "0"

"""The `paceline` command: parse the command line, call the command, and show errors with a hint and an exit code."""

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
from paceline.cli.emulation import COMMAND_LINE
from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.messages import message_console, show_error
from paceline.cli.options import PassThroughCommand
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError, UsageError


class CommandGroup(TyperGroup):
    """Group of all commands. It raises `Abort` on Ctrl-C: typer alone would set the exit code without a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    name="paceline",
    cls=CommandGroup,
    help="Train PyTorch models data-parallel, compare the ways of synchronising gradients, "
    "and see which one to use and why.",
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
app.command("submit", cls=submit.SubmitCommand, options_metavar="[OPTIONS] -- COMMAND [ARGS]...")(submit.command)

EXIT_DELAY_S = 1.0
"""Wait of a process that leaves the error message to another one: a launcher may stop all processes when one exits."""


def _print_version(requested: bool) -> None:
    if requested:
        import importlib.metadata

        typer.echo(importlib.metadata.version("paceline"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; the exit code is that of the kind of failure (`paceline.errors`)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # The warnings of its C++ code do not help a user.
    with CtrlCHandler(handler_after=signal.SIG_DFL) as ctrl_c:  # No traceback on Ctrl-C during Python's exit.
        try:
            code = run(sys.argv[1:] if arguments is None else arguments)
            ctrl_c.defer()
        except KeyboardInterrupt:  # Before or after the command itself.
            ctrl_c.defer()
            code = INTERRUPTED_EXIT_CODE
        with suppress(OSError, ValueError):  # Python's exit flushes again and reports the error.
            sys.stdout.flush()
    sys.exit(INTERRUPTED_EXIT_CODE if ctrl_c.pressed and not code else code)


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code. Bugs in Paceline raise, so that their traceback is shown."""
    COMMAND_LINE.set(arguments)
    try:
        result = app(arguments or ["--help"], standalone_mode=False)
    except PacelineError as error:
        _show_error_once_per_host(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        message_console().print("interrupted", style="bold")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # An error of typer's parser, for example an unknown option.
        _show_error_once_per_host(
            UsageError(error.format_message(), hint="see `paceline --help` or `paceline COMMAND --help`")
        )
        return UsageError.exit_code
    return result if isinstance(result, int) else 0


def _show_error_once_per_host(error: PacelineError) -> None:
    """Print an error. A usage error occurs in every process of a launch: only the first on each host prints it."""
    if isinstance(error, UsageError) and _is_reported_by_another_process(os.environ):
        time.sleep(EXIT_DELAY_S)
    else:
        show_error(error, message_console())


def _is_reported_by_another_process(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started several processes on this host, and this one is not the first."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return environment.get("LOCAL_RANK", "0") != "0"
    in_step = environment.get("SLURM_STEP_NUM_TASKS") == environment.get("SLURM_NTASKS")
    return in_step and environment.get("SLURM_LOCALID", "0") != "0"

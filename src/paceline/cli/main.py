"""The `paceline` command: parse the command line into a request, have an executor carry it out, and show errors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.batch import BatchRequest
from paceline.cli.compare import CompareRequest
from paceline.cli.doctor import DoctorRequest
from paceline.cli.emulation import run_on_emulated_hosts
from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.large_batch import LargeBatchRequest
from paceline.cli.messages import message_console, show_error
from paceline.cli.options import OtherFields, PassThroughCommand, request_parser, with_default_values
from paceline.cli.race import RaceRequest
from paceline.cli.report import ReportRequest
from paceline.cli.requests import LaunchRequest, Request
from paceline.cli.scale import ScaleRequest
from paceline.cli.strategies import StrategiesRequest
from paceline.cli.submit import SubmitCommand, SubmitRequest, other_sbatch_options, words_to_submit
from paceline.cli.train import TrainRequest
from paceline.config.emulation import emulation_info
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
"""Parser of command lines: the function of each command returns a request."""
REQUEST_TYPES: dict[str, type[Request]] = {}
"""Type of request of each command."""
EXIT_DELAY_S = 1.0
"""Wait of a process that leaves the error message to another one: a launcher may stop all processes when one exits."""


def _add_command(request_type: type[Request], other_fields: OtherFields = lambda _: {}, **options: Any) -> None:
    REQUEST_TYPES[request_type.command] = request_type
    app.command(request_type.command, **options)(request_parser(request_type, other_fields))


def _script_arguments(context: typer.Context) -> Mapping[str, Any]:
    return {"script_arguments": tuple(context.args)}


def _submitted_command(context: typer.Context) -> Mapping[str, Any]:
    submitted = parse(words_to_submit(context.args, REQUEST_TYPES))
    if submitted is None:
        raise typer.Exit
    return {"submitted": submitted, "other_options": other_sbatch_options(context)}


_add_command(CompareRequest, _script_arguments, cls=PassThroughCommand)
_add_command(TrainRequest)
_add_command(ScaleRequest)
_add_command(BatchRequest)
_add_command(LargeBatchRequest)
_add_command(RaceRequest)
_add_command(DoctorRequest)
_add_command(ReportRequest)
_add_command(StrategiesRequest)
_add_command(SubmitRequest, _submitted_command, cls=SubmitCommand, options_metavar="[OPTIONS] -- COMMAND [ARGS]...")


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


def parse(arguments: Sequence[str]) -> Request | None:
    """Return the request that a command line makes, without running it; raise `UsageError` if it is wrong.

    Return None if typer has answered it: `--help`, `--version` or no arguments.
    """
    try:
        request = app(with_default_values(arguments) or ["--help"], standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # An error of typer's parser, for example an unknown option.
        hint = "see `paceline --help` or `paceline COMMAND --help`"
        raise UsageError(error.format_message(), hint=hint) from None
    return replace(request, arguments=tuple(arguments)) if isinstance(request, Request) else None


def execute(request: Request) -> int:
    """Execute a request: on emulated hosts with `--emulate`, else in this process; return the exit code.

    This process may be one of several that share a launch. `paceline submit` has Slurm carry out another request.
    """
    if isinstance(request, LaunchRequest) and request.launch.emulate:
        this_host = emulation_info(os.environ)
        if this_host is None:
            return run_on_emulated_hosts(request)
        request = request.on_emulated_host(this_host)
    return request.carry_out()


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code. Bugs in Paceline raise, so that their traceback is shown."""
    try:
        request = parse(arguments)
        return 0 if request is None else execute(request)
    except PacelineError as error:
        _show_error_once_per_host(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        message_console().print("interrupted", style="bold")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # The reader of the output has ended, for example `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For the flush during Python's exit.
        return 1


def main(arguments: Sequence[str] | None = None) -> None:
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

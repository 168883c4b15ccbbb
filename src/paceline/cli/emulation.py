"""Executor for emulated hosts: create them, and run the command line of a request on each."""

from __future__ import annotations

import os

from paceline.cli.messages import message_console, message_printer
from paceline.cli.requests import LaunchRequest


def run_on_emulated_hosts(request: LaunchRequest) -> int:
    """Create the hosts that `--emulate` asks for, and run the request's command line on each of them.

    Return the exit code of host 0.
    """
    from paceline.experiments.names import check_all_names, prepare_all_data
    from paceline.launch.emulation.run import run_emulated
    from paceline.launch.slurm.step import launcher_from_slurm

    launcher_from_slurm(os.environ, request.launch)  # Raises if Slurm started several tasks: each would create hosts.
    check_all_names(request.configs)
    return run_emulated(
        request.launch,
        request.arguments,
        message_printer(message_console()),
        # Emulated hosts can reach only each other, so data sets are downloaded first.
        prepare=lambda: prepare_all_data(request.configs),
    )

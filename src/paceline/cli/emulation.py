"""`--emulate`: the command creates the emulated hosts, and runs again on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from paceline.cli.messages import message_console
from paceline.config import LaunchConfig
from paceline.config.emulation import emulation_info

COMMAND_LINE: ContextVar[Sequence[str]] = ContextVar("command_line")
"""All arguments of this command, which emulated hosts run again."""


def run_or_emulate(configs: Sequence[Any], command: Callable[..., Any]) -> Any:
    """Call a command with its configs, or run its command line on emulated hosts if the launch config sets `emulate`.

    On an emulated host, the command gets the launch config of that host.
    """
    launch = next((config for config in configs if isinstance(config, LaunchConfig)), None)
    if launch is None or not launch.emulate:
        return command(*configs)
    emulated_host = emulation_info(os.environ)
    if emulated_host is not None:
        host_launch = launch.on_emulated_host(emulated_host)
        return command(*[host_launch if config is launch else config for config in configs])
    from paceline.experiments.names import check_all_names, prepare_all_data
    from paceline.launch.emulation.run import run_emulated
    from paceline.launch.slurm.step import launcher_from_slurm

    launcher_from_slurm(os.environ, launch)  # Raises if Slurm started several tasks: each would create hosts.
    check_all_names(configs)
    messages = message_console()
    # Emulated hosts can reach only each other, so data sets are downloaded first.
    fetch = partial(prepare_all_data, configs)
    return run_emulated(launch, COMMAND_LINE.get(), lambda text: messages.print(text, markup=False), prepare=fetch)

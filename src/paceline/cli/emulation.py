"""`--emulate`: the command that was typed makes the hosts, and runs again on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from paceline.cli.messages import messages
from paceline.config import LaunchConfig
from paceline.config.emulation import emulation_info

TYPED: ContextVar[Sequence[str]] = ContextVar("typed")
"""The whole command line, which hosts are to run again."""


def on_hosts(configs: Sequence[Any], command: Callable[..., Any]) -> Any:
    """Runs a command with its configs: here, or, where its launch asks for emulated hosts, on each of them."""
    launch = next((config for config in configs if isinstance(config, LaunchConfig)), None)
    if launch is None or not launch.emulate:
        return command(*configs)
    place = emulation_info(os.environ)
    if place is not None:
        here = launch.on_emulated_host(place)
        return command(*[here if config is launch else config for config in configs])
    from paceline.experiments.names import check_all_names, prepare_all_data
    from paceline.launch.emulation.run import run_emulated
    from paceline.launch.slurm.step import launcher_from_slurm

    launcher_from_slurm(os.environ, launch)  # Refuses tasks that would all make hosts of their own.
    check_all_names(configs)
    console = messages()
    # Emulated hosts reach each other alone, not the places that data sets come from.
    fetch = partial(prepare_all_data, configs)
    return run_emulated(launch, TYPED.get(), lambda text: console.print(text, markup=False), prepare=fetch)

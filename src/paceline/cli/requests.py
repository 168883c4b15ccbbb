"""Requests: the parsed and checked arguments of a command. Each command defines its own subclass.

The fields of a request are its configs and the options that belong to no config. `cli/options.py` makes the options of
the command line from them; the docstring of the class is the help text of the command.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import typer

from paceline.config import LaunchConfig, RunConfig

if TYPE_CHECKING:
    from paceline.config.emulation import EmulationInfo
    from paceline.launch.launcher_process import Shape


@dataclass(frozen=True, kw_only=True)
class Request(ABC):
    """Arguments of one command, and how this process carries it out."""

    command: ClassVar[str]
    """Name of the command."""
    without: ClassVar[frozenset[str]] = frozenset()
    """Settings of its configs that have no option."""
    hidden: ClassVar[frozenset[str]] = frozenset()
    """Settings whose option `--help` does not show: the command ignores them, but accepts those of other commands."""
    help_texts: ClassVar[Mapping[str, str]] = {}
    """Help texts that replace the docstrings of settings."""

    arguments: tuple[str, ...] = field(default=(), compare=False)
    """Command line that the request was parsed from, beginning with the name of the command."""

    @abstractmethod
    def carry_out(self) -> int:
        """Carry out the command in this process; return its exit code."""


@dataclass(frozen=True)
class RequestedRanks:
    """Ranks that a command line sets; 0 where it sets none."""

    total: int
    per_host: int
    exact: bool
    """Whether the launch must have as many; otherwise they are the most that the command needs."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(Request):
    """Arguments of a command that starts ranks: on this machine, on emulated hosts or in a Slurm job."""

    run: RunConfig
    launch: LaunchConfig
    out: Annotated[Path | None, typer.Option(help="Folder for the records [default: a new one under runs/].")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Settings that the command line or the TOML file gives; all others have their defaults."""

    @property
    def configs(self) -> tuple[Any, ...]:
        """All configs of the request."""
        values = (getattr(self, own.name) for own in fields(self))
        return tuple(value for value in values if is_dataclass(value))

    @property
    def words_to_go_on(self) -> tuple[str, ...]:
        """Words that make the command go on in its folder, or begin; none if it does so anyway."""
        return ()

    def check_submitted(self) -> None:
        """Raise if the command cannot run as a job, whose record has a new folder unless `out` names one."""
        from paceline.workloads.given_settings import check_needed

        check_needed(self.run, self.launch)

    def on_emulated_host(self, host: EmulationInfo) -> Self:
        """Return the request that one host of an emulation carries out."""
        return replace(self, launch=self.launch.on_emulated_host(host))

    def requested_ranks(self) -> RequestedRanks:
        """Return the ranks that the command line sets."""
        return RequestedRanks(self.launch.ranks or 0, self.launch.ranks_per_host or 0, exact=True)

    def check_job_shape(self, shape: Shape) -> None:
        """Raise if the command cannot run in a Slurm job of this shape."""

"""Command that a follower was started with, and the jobs that belong to it.

A follower runs no other job, even if its signature fits: the leader decides which of the follower's own runs are due,
with which seed and batch, and where their records are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from paceline.config import LaunchConfig, RunConfig, Script
from paceline.config.setting import metadata_of, option_name
from paceline.errors import LaunchError
from paceline.launch.job import Job, Task

TRAINING: tuple[Task, ...] = ("train",)
EXAMINING: tuple[Task, ...] = ("examine", "examine_machines")
PROVING: tuple[Task, ...] = ("prove", "oracle", "prove_oracle")


@dataclass(frozen=True, kw_only=True)
class OwnCommand:
    """Runs that a command consists of, as this process makes them from its own command line."""

    configs: tuple[RunConfig, ...]
    tasks: tuple[Task, ...] = TRAINING
    script: Script | None = None

    def adopt(self, job: Job, launch: LaunchConfig) -> Job:
        """Return the job with the settings of this host; raise `LaunchError` if it is not part of this command."""
        if job.task not in self.tasks:
            raise _not_own(f"the task {job.task!r}")
        if (job.script is None) != (self.script is None):
            raise _not_own("a script" if job.script else "no script")
        if job.script is not None and self.script is not None:
            for name in ("path", "args"):
                if getattr(job.script, name) != getattr(self.script, name):
                    raise _not_own(f"the script's {name} {getattr(job.script, name)!r}")
        runs = tuple((self._own_config(config), folder) for config, folder in job.runs)
        return replace(job, runs=runs, iface=launch.iface)

    def _own_config(self, config: RunConfig) -> RunConfig:
        """Return a run's config with this host's own folders; raise `LaunchError` if no run of this command has it."""
        differences = [self._differing(config, own) for own in self.configs]
        nearest = min(differences, key=len, default=["workload"])
        if nearest:
            name = nearest[0]
            raise _not_own(f"{option_name(RunConfig, name)} {getattr(config, name)!r}")
        own = self.configs[differences.index(nearest)]
        return replace(config, **{name: getattr(own, name) for name in _names(per_host=True)})

    def _differing(self, config: RunConfig, own: RunConfig) -> list[str]:
        return [name for name in _names(per_host=False) if getattr(config, name) != getattr(own, name)]


def _names(*, per_host: bool) -> Iterable[str]:
    """Return the settings that this host chooses itself, or those that must be as on its command line."""
    metadata = metadata_of(RunConfig)
    names = [own.name for own in fields(RunConfig)]
    if per_host:
        return [name for name in names if metadata[name].per_host]
    return [name for name in names if not metadata[name].per_host and not metadata[name].set_by_leader]


def _not_own(found: str) -> LaunchError:
    return LaunchError(
        f"a follower refused a job with {found}, which is not part of the command that it was started with.",
        hint="start the same command on all hosts; if it is the same, another program sent the job",
    )

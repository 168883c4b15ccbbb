"""Hosts and ranks of a Slurm job: set by `paceline submit`, else by the command that it submits, else by default."""

from __future__ import annotations

import math

from paceline.cli.requests import LaunchRequest
from paceline.config import LaunchConfig
from paceline.config.launch import DEFAULT_CPU_RANKS
from paceline.errors import UsageError
from paceline.launch.launcher_process import Shape
from paceline.launch.slurm.sbatch import SbatchOptions, count_gpus, gpus_per_host, option_value


def choose_job_shape(
    command: LaunchRequest,
    *,
    hosts: int | None,
    ranks: int | None,
    ranks_per_host: int | None,
    sbatch_options: SbatchOptions,
) -> Shape:
    """Return the hosts and the ranks per host of a job; raise if the command cannot run on them."""
    launch, requested = command.launch, command.requested_ranks()
    _check_no_hosts_of_its_own(launch)
    if hosts is None and launch.hosts == 1 and ranks and ranks_per_host and ranks % ranks_per_host == 0:
        hosts = ranks // ranks_per_host
    job_launch = LaunchConfig(hosts=hosts or launch.hosts, ranks=ranks, ranks_per_host=ranks_per_host)
    default = requested.per_host or (
        math.ceil(requested.total / job_launch.hosts)
        if requested.total
        else _default_ranks(command, job_launch.hosts, sbatch_options)
    )
    shape = Shape(job_launch.hosts, job_launch.local_ranks(default))
    total = max(requested.total, shape.hosts * requested.per_host)
    hosts_differ = launch.hosts not in (1, shape.hosts)
    if hosts_differ or total > shape.ranks or (requested.exact and total not in (0, shape.ranks)):
        setting = f"{launch.hosts} hosts" if hosts_differ else f"{total} ranks"
        raise UsageError(
            f"the job has {shape.hosts} × {shape.ranks_per_host} ranks, but the command sets {setting}.",
            hint="set it only once: before `--`, with --hosts and --ranks-per-host",
        )
    command.check_job_shape(shape)
    return shape


def _check_no_hosts_of_its_own(launch: LaunchConfig) -> None:
    """Raise if the command names hosts by their address, or emulates some."""
    for option, value in {"--master": launch.master, "--emulate": launch.emulate}.items():
        if value:
            raise UsageError(
                f"{option} {value} was given in a command for Slurm.",
                hint="Slurm provides the hosts and their addresses: leave it out, or run the command without submit",
            )


def _default_ranks(command: LaunchRequest, hosts: int, options: SbatchOptions) -> int:
    """Return the default ranks per host: 1 for `single`, else one per requested GPU, else `DEFAULT_CPU_RANKS`."""
    from paceline.strategies.registry import trains_in_one_process

    if trains_in_one_process(command.run.strategy):
        return 1
    gpus = gpus_per_host(options, hosts)
    return max(1, gpus // (count_gpus(option_value(options, "--gpus-per-task")) or 1)) if gpus else DEFAULT_CPU_RANKS

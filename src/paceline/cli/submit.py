"""`paceline submit`: submit another command as a Slurm job."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from paceline.cli.options import Request, parse_only
from paceline.config import LaunchConfig, RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.launch.launcher_process import LauncherProcess
from paceline.launch.slurm.sbatch import (
    JOB_ID,
    BatchJob,
    SbatchOptions,
    count_gpus,
    find_log,
    gpus_per_host,
    option_value,
    submit_job,
)

SHORT_OPTIONS = {"-A": "--account", "-c": "--cpus-per-task", "-N": "--nodes", "-n": "--ntasks", "-o": "--output"}
SHORT_OPTIONS |= {"-p": "--partition", "-t": "--time"}
"""Short options of sbatch for options that `paceline submit` has too."""
DEFAULT_CPU_RANKS = 2
"""Ranks per host without GPUs if no option sets them, as in the other commands."""
UNKNOWN_OPTIONS = "paceline.unknown_options"
"""Key of the context's `meta` for the options that are passed on to sbatch."""
ConfigType = TypeVar("ConfigType")
EXAMPLE = "paceline submit --slurm --hosts 2 --ranks-per-host 2 -- compare vgg11"


class SubmitCommand(TyperCommand):
    """Command that keeps unknown options for sbatch, and the arguments after `--` as the command to submit."""

    ignore_unknown_options = True
    allow_extra_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store the command to submit in the context's `args`, and the unknown options in its `meta`."""
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, [_long_option(word) for word in args[:end]])
        ctx.meta[UNKNOWN_OPTIONS] = ctx.args
        ctx.args = args[end + 1 :]
        return args[end + 1 :]


def _long_option(word: str) -> str:
    """Replace a short option of sbatch, such as `-N2`, by the long one; return other words unchanged."""
    name, value = word[:2], word[2:].lstrip("=")
    return f"{SHORT_OPTIONS[name]}={value}" if name in SHORT_OPTIONS and word[2:] else SHORT_OPTIONS.get(word, word)


def command(
    *,
    context: typer.Context,
    slurm: Annotated[
        bool, typer.Option("--slurm", show_default=False, help="Submit to Slurm, the only scheduler supported.")
    ] = True,
    hosts: Annotated[
        int | None, typer.Option("--hosts", "--nodes", min=1, help="Number of hosts [default: as in COMMAND, or 1].")
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-host",
            "--ntasks-per-node",
            min=1,
            help="Ranks per host [default: as in COMMAND; else one per GPU requested, or 2].",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "--ntasks", min=1, help="Total number of ranks, in place of --ranks-per-host or --hosts."
        ),
    ] = None,
    cpus_per_rank: Annotated[
        int | None, typer.Option("--cpus-per-rank", "--cpus-per-task", min=1, help="CPU cores per rank.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account to charge.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition to run in.")] = None,
    gres: Annotated[str | None, typer.Option(help="Generic resources per host, as in gpu:4.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of the job, as in 30 (minutes) or 1:30:00.")] = None,
    output: Annotated[
        str | None, typer.Option(help="Log file of the job [default: slurm-%j.out in this folder].")
    ] = None,
    script: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the job script to this file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the job script; works without Slurm.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print job ID, script, log file and records folder as JSON.")
    ] = False,
) -> None:
    """Submit a paceline command as a Slurm job.

    Example: paceline submit --hosts 2 --ranks-per-host 4 -- compare vgg11

    Slurm starts one task per rank. COMMAND is checked before it is submitted. The job script is printed, then the
    commands that show the state and the log of the job, and the folder of its records. Options that are not listed
    here are passed on to sbatch, for example --qos=high or --mem 32G.
    """
    del slurm
    from paceline.cli.messages import message_console

    words = _command_to_submit(context)
    request = _check_command(words)
    if request is None:  # The command was `--help`, which has been printed.
        return
    launch = _find_config(request, LaunchConfig)
    assert launch is not None
    named_options = {"account": account, "partition": partition, "gres": gres, "time": time}
    options = (
        *[(f"--{name}={value}",) for name, value in named_options.items() if value is not None],
        *_sbatch_options(context.meta[UNKNOWN_OPTIONS]),
    )
    hosts, ranks_per_host = _job_shape(request, launch, hosts, ranks, ranks_per_host, options)
    job = BatchJob(
        command=tuple(words),
        folder=Path.cwd(),
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        cpus_per_rank=cpus_per_rank,
        options=options,
        output=output or "",
        records=str(request.own_options["out"] or _records_folder(words[0], request)),
        add_out_option=not request.own_options["out"],
    )
    text = job.script()
    if script is not None:
        _write_script(text, script)
    if not as_json:  # Printed before it is submitted, because errors of sbatch refer to it.
        typer.echo(text, nl=not dry_run)
    job_id = None if dry_run else submit_job(text, script)
    log = job.log_file(None) if job_id is None else find_log(job, job_id)
    if as_json:
        paths = {"log": log, "records": job.records_folder(job_id)}
        typer.echo(json.dumps({"job": job_id, "script": text, **paths}, indent=2))
    elif job_id is None:
        message_console().print("Dry run: nothing was submitted.")
    else:
        typer.echo(_format_job(job, job_id, log))


def _format_job(job: BatchJob, job_id: int, log: str) -> str:
    """Return the size of a submitted job, and the commands that show its state and log and cancel it."""
    hosts = f"{job.hosts} {'host' if job.hosts == 1 else 'hosts'}"
    ranks = f"{job.ranks_per_host} {'rank' if job.ranks_per_host == 1 else 'ranks'}"
    return (
        f"job {job_id}: {hosts} × {ranks}\n"
        f"  state:    squeue --job={job_id}\n"
        f"  log:      tail -F {shlex.quote(log)}\n"
        f"  cancel:   scancel {job_id}\n"
        f"  records:  {job.records_folder(job_id)}"
    )


def _command_to_submit(context: typer.Context) -> list[str]:
    """Return the words after `--`, without `paceline` if they begin with it."""
    words = context.args[1:] if context.args[:1] == ["paceline"] else list(context.args)
    if not words:
        raise UsageError("no command to submit was given.", hint=f"write it after `--`, as in {EXAMPLE}")
    return words


def _check_command(words: Sequence[str]) -> Request | None:
    """Parse and check the command now, so that an error is found before it waits in the queue; None for `--help`."""
    from paceline.cli.main import app
    from paceline.experiments.names import check_all_names

    starts_ranks = {
        info.name: LaunchConfig in getattr(info.callback, "config_types", ())
        for info in app.registered_commands
        if info.name
    }
    if not starts_ranks.get(words[0], True):
        names = ", ".join(name for name, starts in starts_ranks.items() if starts)
        raise UsageError(
            f"`paceline {words[0]}` starts no ranks.",
            hint=f"run it without submit; commands that can be submitted: {names}",
        )
    with parse_only() as requests:
        app(list(words), standalone_mode=False)
    if not requests:
        return None
    check_all_names(requests[0].configs)
    return requests[0]


def _job_shape(
    request: Request,
    launch: LaunchConfig,
    hosts: int | None,
    ranks: int | None,
    ranks_per_host: int | None,
    options: SbatchOptions,
) -> tuple[int, int]:
    """Return the hosts, and the ranks per host: from the options of submit, else of the command, else the defaults."""
    for option, value in {"--master": launch.master, "--emulate": launch.emulate}.items():
        if value:
            raise UsageError(
                f"{option} {value} was given in a command for Slurm.",
                hint="Slurm provides the hosts and their addresses: leave it out, or run the command without submit",
            )
    if hosts is None and launch.hosts == 1 and ranks and ranks_per_host and ranks % ranks_per_host == 0:
        hosts = ranks // ranks_per_host
    job_launch = LaunchConfig(hosts=hosts or launch.hosts, ranks=ranks, ranks_per_host=ranks_per_host)
    command_ranks, command_per_host, exact = _ranks_of_command(request, launch)
    default = command_per_host or (
        math.ceil(command_ranks / job_launch.hosts)
        if command_ranks
        else _default_ranks(request, job_launch.hosts, options)
    )
    per_host = job_launch.local_ranks(default)
    job_ranks, command_ranks = job_launch.hosts * per_host, max(command_ranks, job_launch.hosts * command_per_host)
    hosts_differ = launch.hosts not in (1, job_launch.hosts)
    if hosts_differ or command_ranks > job_ranks or (exact and command_ranks not in (0, job_ranks)):
        setting = f"{launch.hosts} hosts" if hosts_differ else f"{command_ranks} ranks"
        raise UsageError(
            f"the job has {job_launch.hosts} × {per_host} ranks, but the command sets {setting}.",
            hint="set it only once: before `--`, with --hosts and --ranks-per-host",
        )
    _check_scale(request, job_launch.hosts, per_host)
    return job_launch.hosts, per_host


def _check_scale(request: Request, hosts: int, ranks_per_host: int) -> None:
    """Raise if the world sizes of `scale` cannot be spread evenly over the hosts of the job."""
    from paceline.experiments.scaling.shapes import choose_shapes

    scale = _find_config(request, ScaleConfig)
    if scale is not None:
        launcher = LauncherProcess(
            launchers=hosts * ranks_per_host, ranks=1, local_size=ranks_per_host, started_by="slurm"
        )
        choose_shapes(scale, launcher, on_one_host=ranks_per_host)


def _ranks_of_command(request: Request, launch: LaunchConfig) -> tuple[int, int, bool]:
    """Return total ranks and ranks per host that the command sets, 0 if unset, and whether the job must match them."""
    scale = _find_config(request, ScaleConfig)
    if scale is not None:
        return max(scale.rank_counts, default=0), max(scale.per_host, default=0), False
    return launch.ranks or 0, launch.ranks_per_host or 0, True


def _default_ranks(request: Request, hosts: int, options: SbatchOptions) -> int:
    """Return the default ranks per host: 1 for `single`, else one per requested GPU, else `DEFAULT_CPU_RANKS`."""
    from paceline.strategies.registry import trains_in_one_process

    run = _find_config(request, RunConfig)
    if run is not None and trains_in_one_process(run.strategy):
        return 1
    gpus = gpus_per_host(options, hosts)
    return max(1, gpus // (count_gpus(option_value(options, "--gpus-per-task")) or 1)) if gpus else DEFAULT_CPU_RANKS


def _sbatch_options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Group words into options of sbatch, each with its value if that is a separate word."""
    options: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("-"):
            options.append((word,))
        elif options and len(options[-1]) == 1 and "=" not in options[-1][0]:
            options[-1] = (*options[-1], word)
        else:
            raise UsageError(
                f"{word!r} is not an option of sbatch.", hint=f"write the command after `--`, as in {EXAMPLE}"
            )
    return options


def _records_folder(command_name: str, request: Request) -> str:
    """Return the default folder of the records, which contains the job ID."""
    run = _find_config(request, RunConfig)
    words = re.sub(r"[^A-Za-z0-9_=.]+", "-", f"{run.workload}-{command_name}" if run is not None else command_name)
    return f"runs/slurm-{JOB_ID}-{words}"


def _find_config(request: Request, kind: type[ConfigType]) -> ConfigType | None:
    return next((config for config in request.configs if isinstance(config, kind)), None)


def _write_script(text: str, file: Path) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}.", hint="give another file with --script") from None

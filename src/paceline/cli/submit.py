"""`paceline submit`: another command as a job for Slurm."""

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

from paceline.cli.options import Request, only_asked
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

SHORT = {"-A": "--account", "-c": "--cpus-per-task", "-N": "--nodes", "-n": "--ntasks", "-o": "--output"}
SHORT |= {"-p": "--partition", "-t": "--time"}
"""How sbatch abbreviates options that are ours too."""
RANKS_ON_A_CPU = 2
"""As `paceline` itself does where it is not told how many ranks."""
PASSED_ON = "paceline.passed_on"
AnyConfig = TypeVar("AnyConfig")
EXAMPLE = "paceline submit --slurm --hosts 2 --ranks-per-host 2 -- compare vgg11"


class SbatchOptionsCommand(TyperCommand):
    """Keeps options that it does not know for sbatch, and what follows `--` as the command to submit."""

    ignore_unknown_options = True
    allow_extra_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leaves the command in the context's `args`, the other options in its `meta`."""
        end = args.index("--") if "--" in args else len(args)
        own = [
            f"{SHORT[a[:2]]}={a[2:].lstrip('=')}" if a[:2] in SHORT and a[2:] else SHORT.get(a, a) for a in args[:end]
        ]
        super().parse_args(ctx, own)
        ctx.meta[PASSED_ON] = ctx.args
        ctx.args = args[end + 1 :]
        return args[end + 1 :]


def command(
    *,
    context: typer.Context,
    slurm: Annotated[bool, typer.Option("--slurm", show_default=False, help="To Slurm, the only one there is.")] = True,
    hosts: Annotated[
        int | None, typer.Option("--hosts", "--nodes", min=1, help="Hosts [default: the command's, or 1].")
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-host",
            "--ntasks-per-node",
            min=1,
            help="Ranks on each host [default: the command's; else one per GPU of --gres or --gpus-per-node, or 2].",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "--ntasks", min=1, help="The other way to say it: ranks on all hosts.")
    ] = None,
    cpus_per_rank: Annotated[
        int | None, typer.Option("--cpus-per-rank", "--cpus-per-task", min=1, help="Cores of each rank.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Who pays.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition to run in.")] = None,
    gres: Annotated[str | None, typer.Option(help="What each host has to have, as gpu:4.")] = None,
    time: Annotated[str | None, typer.Option(help="How long it may take, as 30 (minutes) or 1:30:00.")] = None,
    output: Annotated[str | None, typer.Option(help="The file of what it prints [default: slurm-%j.out here].")] = None,
    script: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the script there.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the script; needs no Slurm.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print job, script, log and records as JSON.")] = False,
) -> None:
    """Submit another command to Slurm, which starts a task for each rank: the command follows `--`.

    All other options go to sbatch as they are, as --qos=high or --mem 32G. The command is checked before it is
    submitted; the script is shown, and how to follow the job, and where its records will be.
    """
    del slurm
    from paceline.cli.messages import messages

    words = _command_of(context)
    asked = _ask(words)
    if asked is None:  # It asked for help, and got it.
        return
    launch = _config(asked, LaunchConfig)
    assert launch is not None
    named = {"account": account, "partition": partition, "gres": gres, "time": time}
    options = (
        *[(f"--{name}={value}",) for name, value in named.items() if value is not None],
        *_for_sbatch(context.meta[PASSED_ON]),
    )
    hosts, ranks_per_host = _shape(asked, launch, hosts, ranks, ranks_per_host, options)
    job = BatchJob(
        command=tuple(words),
        folder=Path.cwd(),
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        cpus_per_rank=cpus_per_rank,
        options=options,
        output=output or "",
        records=str(asked.rest["out"] or _folder_name(words[0], asked)),
        add_out_option=not asked.rest["out"],
    )
    text = job.script()
    if script is not None:
        _keep(text, script)
    if not as_json:  # Before it is submitted: what sbatch says of it can then be understood.
        typer.echo(text, nl=not dry_run)
    number = None if dry_run else submit_job(text, script)
    log = job.log_file(None) if number is None else find_log(job, number)
    if as_json:
        where = {"log": log, "records": job.records_folder(number)}
        typer.echo(json.dumps({"job": number, "script": text, **where}, indent=2))
    elif number is None:
        messages().print("A dry run: nothing was submitted.")
    else:
        typer.echo(_how_to_follow(job, number, log))


def _how_to_follow(job: BatchJob, number: int, log: str) -> str:
    hosts = f"{job.hosts} {'host' if job.hosts == 1 else 'hosts'}"
    ranks = f"{job.ranks_per_host} {'rank' if job.ranks_per_host == 1 else 'ranks'}"
    return (
        f"job {number}: {hosts} × {ranks}\n"
        f"  where it stands:  squeue --job={number}\n"
        f"  what it prints:   tail -F {shlex.quote(log)}\n"
        f"  to end it:        scancel {number}\n"
        f"  its records:      {job.records_folder(number)}"
    )


def _command_of(context: typer.Context) -> list[str]:
    """What follows `--`, which may begin with the name of the program."""
    words = context.args[1:] if context.args[:1] == ["paceline"] else list(context.args)
    if not words:
        raise UsageError("there is no command to submit.", hint=f"it follows `--`, as in {EXAMPLE}")
    return words


def _ask(words: Sequence[str]) -> Request | None:
    """Has the command say what it would do: whatever it refuses, it refuses now, and not after an hour in a queue."""
    from paceline.cli.main import app
    from paceline.experiments.names import check_all_names

    takes_ranks = {
        info.name: LaunchConfig in getattr(info.callback, "kinds", ()) for info in app.registered_commands if info.name
    }
    if not takes_ranks.get(words[0], True):
        names = ", ".join(name for name, takes in takes_ranks.items() if takes)
        raise UsageError(f"`paceline {words[0]}` starts no ranks.", hint=f"run it here; what can be submitted: {names}")
    with only_asked() as heard:
        app(list(words), standalone_mode=False)
    if not heard:
        return None
    check_all_names(heard[0].configs)
    return heard[0]


def _shape(
    asked: Request,
    launch: LaunchConfig,
    hosts: int | None,
    ranks: int | None,
    ranks_per_host: int | None,
    options: SbatchOptions,
) -> tuple[int, int]:
    """Hosts, and ranks on each: what submit was told, else what the command was, else what one host takes."""
    for option, value in {"--master": launch.master, "--emulate": launch.emulate}.items():
        if value:
            raise UsageError(
                f"{option} {value} was given in a command for Slurm.",
                hint="Slurm has hosts, and says where they meet: leave it out, or run the command without submit",
            )
    if hosts is None and launch.hosts == 1 and ranks and ranks_per_host and ranks % ranks_per_host == 0:
        hosts = ranks // ranks_per_host
    given = LaunchConfig(hosts=hosts or launch.hosts, ranks=ranks, ranks_per_host=ranks_per_host)
    wanted, wanted_per_host, exactly = _ranks_of_command(asked, launch)
    default = wanted_per_host or (
        math.ceil(wanted / given.hosts) if wanted else _default_ranks(asked, given.hosts, options)
    )
    per_host = given.local_ranks(default)
    there, wanted = given.hosts * per_host, max(wanted, given.hosts * wanted_per_host)
    if launch.hosts not in (1, given.hosts) or wanted > there or (exactly and wanted not in (0, there)):
        told = f"{launch.hosts} hosts" if launch.hosts not in (1, given.hosts) else f"{wanted} ranks"
        raise UsageError(
            f"the job has {given.hosts} × {per_host} ranks, but its command asks for {told}.",
            hint="say it once: before `--`, with --hosts and --ranks-per-host",
        )
    _check_scale(asked, given.hosts, per_host)
    return given.hosts, per_host


def _check_scale(asked: Request, hosts: int, ranks_per_host: int) -> None:
    """Refuses numbers of ranks that `scale` could not put on the hosts of the job."""
    from paceline.experiments.scaling.shapes import choose_shapes

    scale = _config(asked, ScaleConfig)
    if scale is not None:
        launcher = LauncherProcess(
            launchers=hosts * ranks_per_host, ranks=1, local_size=ranks_per_host, started_by="slurm"
        )
        choose_shapes(scale, launcher, on_one_host=ranks_per_host)


def _ranks_of_command(asked: Request, launch: LaunchConfig) -> tuple[int, int, bool]:
    """Ranks on all hosts and on each that the command names, or 0; whether it takes no more than that."""
    scale = _config(asked, ScaleConfig)
    if scale is not None:
        return max(scale.rank_counts, default=0), max(scale.per_host, default=0), False
    return launch.ranks or 0, launch.ranks_per_host or 0, True


def _default_ranks(asked: Request, hosts: int, options: SbatchOptions) -> int:
    """One for each GPU that every host has to have, as on a host that has them; else as on one without."""
    run = _config(asked, RunConfig)
    if run is not None and run.strategy.partition(":")[0] == "single":
        return 1
    gpus = gpus_per_host(options, hosts)
    return max(1, gpus // (count_gpus(option_value(options, "--gpus-per-task")) or 1)) if gpus else RANKS_ON_A_CPU


def _for_sbatch(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Options that are not ours, each with its value if that is a word of its own."""
    options: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("-"):
            options.append((word,))
        elif options and len(options[-1]) == 1 and "=" not in options[-1][0]:
            options[-1] = (*options[-1], word)
        else:
            raise UsageError(f"{word!r} is not an option of sbatch.", hint=f"what to run follows `--`, as in {EXAMPLE}")
    return options


def _folder_name(name: str, asked: Request) -> str:
    """Where the records go if the user does not say: told apart by the job, whose number Slurm gives."""
    run = _config(asked, RunConfig)
    words = re.sub(r"[^A-Za-z0-9_=.]+", "-", f"{run.workload}-{name}" if run is not None else name)
    return f"runs/slurm-{JOB_ID}-{words}"


def _config(asked: Request, kind: type[AnyConfig]) -> AnyConfig | None:
    return next((config for config in asked.configs if isinstance(config, kind)), None)


def _keep(text: str, file: Path) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}.", hint="name another file with --script") from None

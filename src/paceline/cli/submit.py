"""`paceline submit`: the executor that has another command run in a Slurm job."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from paceline.cli.job_shape import choose_job_shape
from paceline.cli.messages import message_console, print_json
from paceline.cli.requests import LaunchRequest, Request
from paceline.errors import UsageError
from paceline.formatting import plural
from paceline.launch.slurm.sbatch import JOB_ID, BatchJob, Requeue, find_log, submit_job

SHORT_OPTIONS = {"-A": "--account", "-c": "--cpus-per-task", "-N": "--nodes", "-n": "--ntasks", "-o": "--output"}
SHORT_OPTIONS |= {"-p": "--partition", "-t": "--time"}
"""Short options of sbatch for options that `paceline submit` has too."""
UNKNOWN_OPTIONS = "paceline.unknown_options"
"""Key of the context's `meta` for the options that are passed on to sbatch."""
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


@dataclass(frozen=True, kw_only=True)
class SubmitRequest(Request):
    """Submit a paceline command as a Slurm job.

    Example: paceline submit --hosts 2 --ranks-per-host 4 -- compare vgg11

    Slurm starts one task per rank. COMMAND is checked before it is submitted. The job script is printed, then the
    commands that show the state and the log of the job, and the folder of its records. Options that are not listed
    here are passed on to sbatch, for example --qos=high or --mem 32G.
    """

    command: ClassVar[str] = "submit"

    slurm: Annotated[
        bool, typer.Option("--slurm", show_default=False, help="Submit to Slurm, the only scheduler supported.")
    ] = True
    hosts: Annotated[
        int | None, typer.Option("--hosts", "--nodes", min=1, help="Number of hosts [default: as in COMMAND, or 1].")
    ] = None
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-host",
            "--ntasks-per-node",
            min=1,
            help="Ranks per host [default: as in COMMAND; else one per GPU requested, or 2].",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "--ntasks", min=1, help="Total number of ranks, in place of --ranks-per-host or --hosts."
        ),
    ] = None
    cpus_per_rank: Annotated[
        int | None, typer.Option("--cpus-per-rank", "--cpus-per-task", min=1, help="CPU cores per rank.")
    ] = None
    account: Annotated[str | None, typer.Option(help="Slurm account to charge.")] = None
    partition: Annotated[str | None, typer.Option(help="Slurm partition to run in.")] = None
    gres: Annotated[str | None, typer.Option(help="Generic resources per host, as in gpu:4.")] = None
    time: Annotated[str | None, typer.Option(help="Time limit of the job, as in 30 (minutes) or 1:30:00.")] = None
    output: Annotated[str | None, typer.Option(help="Log file of the job [default: slurm-%j.out in this folder].")] = (
        None
    )
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="Start the job again after preemption, the loss of a host or its time limit; the command goes on. "
            "A run of train needs --checkpoint-every for that.",
        ),
    ] = False
    script: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the job script to this file.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the job script; works without Slurm.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print job ID, script, log file and records folder as JSON.")
    ] = False
    other_options: tuple[tuple[str, ...], ...] = ()
    """Options that are passed on to sbatch, each with its value if that is a separate word."""
    submitted: LaunchRequest
    """Command that the job runs."""

    @property
    def sbatch_options(self) -> tuple[tuple[str, ...], ...]:
        """All options of sbatch but those for hosts, ranks, cores and the log."""
        named = {"account": self.account, "partition": self.partition, "gres": self.gres, "time": self.time}
        return *[(f"--{name}={value}",) for name, value in named.items() if value is not None], *self.other_options

    def carry_out(self) -> int:
        """Submit the command, and print the script, the commands for the job, and the paths of its log and records."""
        job = make_job(self.submitted, self)
        text = job.script()
        if self.script is not None:
            _write_script(text, self.script)
        if not self.as_json:  # Printed before it is submitted, because errors of sbatch refer to it.
            typer.echo(text, nl=not self.dry_run)
        job_id = None if self.dry_run else submit_job(text, self.script)
        log = job.log_file(None) if job_id is None else find_log(job, job_id)
        if self.as_json:
            paths = {"log": log, "records": job.records_folder(job_id)}
            print_json({"job": job_id, "script": text, **paths})
        elif job_id is None:
            message_console().print("Dry run: nothing was submitted.")
        else:
            typer.echo(_format_job(job, job_id, log))
        return 0


def make_job(command: LaunchRequest, options: SubmitRequest) -> BatchJob:
    """Check the command now, so that an error is found before it waits in the queue, and return its Slurm job."""
    from paceline.experiments.names import check_all_names

    command.check_submitted()
    check_all_names(command.configs)
    shape = choose_job_shape(
        command,
        hosts=options.hosts,
        ranks=options.ranks,
        ranks_per_host=options.ranks_per_host,
        sbatch_options=options.sbatch_options,
    )
    return BatchJob(
        command=command.arguments,
        folder=Path.cwd(),
        hosts=shape.hosts,
        ranks_per_host=shape.ranks_per_host,
        cpus_per_rank=options.cpus_per_rank,
        options=options.sbatch_options,
        output=options.output or "",
        records=str(command.out or _records_folder(command)),
        add_out_option=not command.out,
        requeue=Requeue(grace_s=math.ceil(command.launch.grace), arguments=command.words_to_go_on)
        if options.requeue
        else None,
    )


def words_to_submit(words: Sequence[str], request_types: Mapping[str, type[Request]]) -> list[str]:
    """Return the command line to submit, without `paceline` if it begins with it; raise if it starts no ranks."""
    line = list(words[1:] if words[:1] == ["paceline"] else words)
    if not line:
        raise UsageError("no command to submit was given.", hint=f"write it after `--`, as in {EXAMPLE}")
    names = [name for name, kind in request_types.items() if issubclass(kind, LaunchRequest)]
    if line[0] in request_types and line[0] not in names:
        raise UsageError(
            f"`paceline {line[0]}` starts no ranks.",
            hint=f"run it without submit; commands that can be submitted: {', '.join(names)}",
        )
    return line


def other_sbatch_options(context: typer.Context) -> tuple[tuple[str, ...], ...]:
    """Return the options that are passed on to sbatch, each with its value if that is a separate word."""
    options: list[tuple[str, ...]] = []
    for word in context.meta[UNKNOWN_OPTIONS]:
        if word.startswith("-"):
            options.append((word,))
        elif options and len(options[-1]) == 1 and "=" not in options[-1][0]:
            options[-1] = (*options[-1], word)
        else:
            raise UsageError(
                f"{word!r} is not an option of sbatch.", hint=f"write the command after `--`, as in {EXAMPLE}"
            )
    return tuple(options)


def _records_folder(command: LaunchRequest) -> str:
    """Return the default folder of the records, which contains the job ID."""
    words = re.sub(r"[^A-Za-z0-9_=.]+", "-", f"{command.run.workload}-{command.command}")
    return f"runs/slurm-{JOB_ID}-{words}"


def _write_script(text: str, file: Path) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}.", hint="give another file with --script") from None


def _format_job(job: BatchJob, job_id: int, log: str) -> str:
    """Return the size of a submitted job, and the commands that show its state and log and cancel it."""
    return (
        f"job {job_id}: {plural(job.hosts, 'host')} × {plural(job.ranks_per_host, 'rank')}\n"
        f"  state:    squeue --job={job_id}\n"
        f"  log:      tail -F {shlex.quote(log)}\n"
        f"  cancel:   scancel {job_id}\n"
        f"  records:  {job.records_folder(job_id)}"
    )

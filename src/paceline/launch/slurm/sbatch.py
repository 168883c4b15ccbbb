"""Batch jobs for Slurm: write the script, submit it with `sbatch`, find its log. Free of torch."""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.whole_number import whole_number
from paceline.errors import LaunchError, PreemptedError, UsageError
from paceline.launch.slurm.scontrol import scontrol
from paceline.signing import TOKEN_VARIABLE

JOB_ID = "%j"
"""Slurm's file name pattern for the job ID, used until Slurm has assigned the ID."""
TOKEN_LINES = (
    "# Tasks recognise each other by a token, which srun passes on in the environment.",
    f"{TOKEN_VARIABLE}=$({shlex.quote(sys.executable)} -c 'import secrets; print(secrets.token_hex(32))')",
    f"export {TOKEN_VARIABLE}",
)
"""Lines of a script that make a new token each time the job starts: neither the script nor a file contains one."""
SbatchOptions = Sequence[tuple[str, ...]]
"""Options of sbatch: each a tuple of the option and, if it is a separate word, its value."""


@dataclass(frozen=True, kw_only=True)
class Requeue:
    """Job that Slurm starts again after preemption, the loss of a host, or its time limit."""

    grace_s: int
    """Seconds before the time limit at which the tasks are asked to stop."""
    arguments: tuple[str, ...]
    """Arguments that make the command go on in its folder, or begin if there is nothing to go on from."""

    @property
    def options(self) -> list[str]:
        """Options of sbatch. Without `B:`, the signal goes to the tasks of srun, not to the batch script."""
        return ["--requeue", "--open-mode=append", f"--signal=USR1@{self.grace_s}"]

    def lines(self, srun: str) -> list[str]:
        """Return the lines of the script that run the command, and queue the job again if a signal stopped it."""
        return [
            "code=0",
            f"{srun} || code=$?",
            "# Slurm queues a job again after preemption, but not at its time limit.",
            f'if [ "$code" -eq {PreemptedError.exit_code} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
        ]


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Job for Slurm that runs a `paceline` command, with one task for each rank."""

    command: tuple[str, ...]
    """Arguments of `paceline`, beginning with the command."""
    folder: Path
    """Working directory of the job: the folder that it is submitted from."""
    hosts: int
    ranks_per_host: int
    records: str
    """Folder of its records: the user's, or a generated name that contains `JOB_ID`."""
    add_out_option: bool = True
    """Whether to add `--out` with the folder to the command; False if the user gave `--out`."""
    cpus_per_rank: int | None = None
    options: tuple[tuple[str, ...], ...] = ()
    """Further options of sbatch; they override those that Paceline sets."""
    output: str = ""
    """Log file, with Slurm's file name patterns; empty for slurm-%j.out."""
    requeue: Requeue | None = None
    """Way in which the job goes on when Slurm starts it again; None if it does not."""

    @property
    def name(self) -> str:
        """Name of the job in Slurm."""
        return option_value(self.options, "--job-name", "-J") or f"paceline-{self.command[0]}"

    def log_file(self, job: int | None) -> str:
        """Return the log file. With a job ID, expand Slurm's patterns, except those that are not known here (%N)."""
        if not self.output:
            return str(self.folder / _with_job_id(f"slurm-{JOB_ID}.out", job))
        start = self.folder / (option_value(self.options, "--chdir", "-D") or "")
        return str(start / (self.output if job is None else self.expand(self.output, job)))

    def records_folder(self, job: int | None) -> str:
        """Return the folder of its records. A pattern in a name that the user gave is not expanded."""
        return str(self.folder / (_with_job_id(self.records, job) if self.add_out_option else self.records))

    def expand(self, pattern: str, job: int) -> str:
        """Return a file name with Slurm's patterns expanded."""

        def expanded(code: re.Match[str]) -> str:
            match code[2]:
                case "j" | "A":
                    return str(job).zfill(min(int(code[1] or 0), 10))
                case "x":
                    return self.name
                case "u":
                    return getpass.getuser()
                case other:
                    return other

        return re.sub(r"%(\d*)([jAxu%])", expanded, pattern)

    def script(self) -> str:
        """Return the batch script."""
        for word in [
            *self.command,
            *[word for option in self.options for word in option],
            self.output,
            str(self.folder),
        ]:
            _check_no_line_break(word)
        directory = str(self.folder).replace("%", "%%")
        output = self.output or f"{directory}/slurm-{JOB_ID}.out"
        ranks = [f"--nodes={self.hosts}", f"--ntasks-per-node={self.ranks_per_host}"]
        # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
        ranks += [f"--cpus-per-task={self.cpus_per_rank}"] if self.cpus_per_rank is not None else []
        again = ["--no-requeue"] if self.requeue is None else self.requeue.options
        own = [f"--job-name=paceline-{self.command[0]}", f"--output={output}", *again, *ranks]
        srun = " ".join(["srun", *ranks, shlex.quote(sys.executable), "-m paceline", *self._arguments()])
        options = [(option,) for option in own] + list(self.options)
        return "\n".join(
            [
                "#!/bin/bash",
                *["#SBATCH " + " ".join(map(_quote_for_sbatch, option)) for option in options],
                "set -euo pipefail",
                f"cd {shlex.quote(str(self.folder))}",
                *TOKEN_LINES,
                *([srun] if self.requeue is None else self.requeue.lines(srun)),
                "",
            ]
        )

    def _arguments(self) -> list[str]:
        name, *rest = map(shlex.quote, self.command)
        # Before all other options: arguments after `--` belong to the user's script.
        out = [f'--out "{self.records.replace(JOB_ID, "${SLURM_JOB_ID}")}"'] if self.add_out_option else []
        return [name, *out, *([] if self.requeue is None else map(shlex.quote, self.requeue.arguments)), *rest]


def submit_job(script: str, file: Path | None) -> int:
    """Submit a script, from its file if it has one; return the job ID. Raise `LaunchError` if sbatch fails."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "sbatch was not found on this machine.",
            hint="submit from a login node of the cluster; --dry-run only shows the script, --script FILE saves it",
        )
    command = [sbatch, "--parsable", *([] if file is None else [str(file)])]
    done = subprocess.run(command, input=None if file else script, capture_output=True, text=True, check=False)
    job = re.match(r"\d+", done.stdout)
    if job is None:  # The exit code is no sign of failure: with --wait it is the exit code of the job.
        output = (done.stderr + done.stdout).strip()
        raise LaunchError(
            "sbatch rejected the job.",
            hint="correct the options that sbatch's message above names",
            detail=output or None,
        )
    return int(job[0])


def find_log(job: BatchJob, number: int) -> str:
    """Return the log file of a submitted job, from scontrol, otherwise from the job's options."""
    found = re.search(r"^ *StdOut=(/.*)$", scontrol("show", "job", str(number)), re.MULTILINE)
    # Some versions of Slurm print the patterns unexpanded.
    return job.expand(found[1], number) if found else job.log_file(number)


def option_value(options: SbatchOptions, *names: str) -> str | None:
    """Return the value of an sbatch option, given by any of its names; the last occurrence counts."""
    value = None
    for word, *others in options:
        for name in names:
            if word == name:
                value = others[0] if others else None
            elif word.startswith(f"{name}=") or (word.startswith(name) and not name.startswith("--")):
                value = word.removeprefix(name).removeprefix("=")
    return value


def gpus_per_host(options: SbatchOptions, hosts: int) -> int:
    """Return the GPUs per host that the options request, by --gres, --gpus-per-node or --gpus."""
    gres = [part for part in (option_value(options, "--gres") or "").split(",") if re.split(r"[:(]", part)[0] == "gpu"]
    return (
        sum(map(count_gpus, gres))
        or count_gpus(option_value(options, "--gpus-per-node"))
        or count_gpus(option_value(options, "--gpus", "-G")) // hosts
    )


def count_gpus(text: str | None) -> int:
    """Return the number of GPUs in 4, a100:4, a100:2,v100:2 or gpu:a100:4(S:0-1); 1 without a number, 0 for None."""
    counts = [part.partition("(")[0].rpartition(":")[2] for part in (text or "").split(",") if part]
    numbers = [whole_number(count) for count in counts]
    return sum(1 if number is None else number for number in numbers)


def _quote_for_sbatch(word: str) -> str:
    """Quote a word of an #SBATCH line; unlike in a shell, a backslash escapes in every kind of quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _with_job_id(name: str, job: int | None) -> str:
    return name if job is None else name.replace(JOB_ID, str(job))


def _check_no_line_break(word: str) -> None:
    if re.search(r"[\r\n\0]", word):
        raise UsageError(
            f"{word!r} contains a line break.", hint="remove it: an option in a batch script must be one line"
        )

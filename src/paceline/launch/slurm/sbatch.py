"""A job for Slurm: the script that `sbatch` takes, and handing it in. Free of torch."""

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

from paceline.errors import LaunchError, UsageError

JOB = "%j"
"""What stands for the number of the job until Slurm has given it one: its own sign in names of files."""
SCONTROL_S = 20.0
SbatchOptions = Sequence[tuple[str, ...]]
"""Options of sbatch, each with its value if that is a word of its own."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A `paceline` command as a job for Slurm: one task for each rank."""

    command: tuple[str, ...]
    """What `paceline` is given."""
    folder: Path
    """Where it runs: the one it was handed in from."""
    hosts: int
    ranks_per_host: int
    records: str
    """The folder of its records: the user's, or ours, with `JOB` in its name."""
    names_records: bool = True
    """Whether the command has to be told of the folder; the user may have done that."""
    cpus_per_rank: int | None = None
    options: tuple[tuple[str, ...], ...] = ()
    """Any others of sbatch, each with its value if that is a word of its own; they win over ours."""
    output: str = ""
    """The file of what it prints, with Slurm's signs in it [default: slurm-%j.out]."""

    @property
    def name(self) -> str:
        """What Slurm calls it."""
        return value_of(self.options, "--job-name", "-J") or f"paceline-{self.command[0]}"

    def log_file(self, job: int | None) -> str:
        """The file of what it prints, with what is known of Slurm's signs in it; not the first node's name, %N."""
        if not self.output:
            return str(self.folder / _with_number(f"slurm-{JOB}.out", job))
        start = self.folder / (value_of(self.options, "--chdir", "-D") or "")
        return str(start / (self.output if job is None else self.expand(self.output, job)))

    def records_folder(self, job: int | None) -> str:
        """The folder of its records; a sign in a name that the user gave is part of the name."""
        return str(self.folder / (_with_number(self.records, job) if self.names_records else self.records))

    def expand(self, pattern: str, job: int) -> str:
        """The name of a file, from one with Slurm's signs."""

        def meant(sign: re.Match[str]) -> str:
            match sign[2]:
                case "j" | "A":
                    return str(job).zfill(min(int(sign[1] or 0), 10))
                case "x":
                    return self.name
                case "u":
                    return getpass.getuser()
                case other:
                    return other

        return re.sub(r"%(\d*)([jAxu%])", meant, pattern)

    def script(self) -> str:
        """The text that sbatch takes."""
        for word in [
            *self.command,
            *[word for option in self.options for word in option],
            self.output,
            str(self.folder),
        ]:
            _refuse_line_breaks(word)
        directory = str(self.folder).replace("%", "%%")
        output = self.output or f"{directory}/slurm-{JOB}.out"
        ranks = [f"--nodes={self.hosts}", f"--ntasks-per-node={self.ranks_per_host}"]
        # Since 22.05 srun does not take over the cores per task that sbatch was given.
        ranks += [f"--cpus-per-task={self.cpus_per_rank}"] if self.cpus_per_rank is not None else []
        own = [f"--job-name=paceline-{self.command[0]}", f"--output={output}", "--no-requeue", *ranks]
        options = [(option,) for option in own] + list(self.options)
        return "\n".join(
            [
                "#!/bin/bash",
                *["#SBATCH " + " ".join(map(_quoted_for_sbatch, option)) for option in options],
                "set -euo pipefail",
                f"cd {shlex.quote(str(self.folder))}",
                " ".join(["srun", *ranks, shlex.quote(sys.executable), "-m paceline", *self._arguments()]),
                "",
            ]
        )

    def _arguments(self) -> list[str]:
        name, *rest = map(shlex.quote, self.command)
        # Before all others: what follows a `--` belongs to a program of the user's own.
        out = [f'--out "{self.records.replace(JOB, "${SLURM_JOB_ID}")}"'] if self.names_records else []
        return [name, *out, *rest]


def submit_job(script: str, file: Path | None) -> int:
    """Gives a script to sbatch, from its file where it has one; the number of the job."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "there is no sbatch on this machine.",
            hint="submit from a login node of the cluster; --dry-run only shows the script, --script FILE keeps it",
        )
    command = [sbatch, "--parsable", *([] if file is None else [str(file)])]
    done = subprocess.run(command, input=None if file else script, capture_output=True, text=True, check=False)
    job = re.match(r"\d+", done.stdout)
    if job is None:  # With --wait the exit code is the job's.
        said = (done.stderr + done.stdout).strip()
        raise LaunchError("sbatch did not take the job.", hint="what it says stands above", detail=said or None)
    return int(job[0])


def find_log(job: BatchJob, number: int) -> str:
    """The file of what a job prints: Slurm's word, where it gives it."""
    try:
        asked = ["scontrol", "show", "job", str(number)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SCONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return job.log_file(number)
    found = re.search(r"^ *StdOut=(/.*)$", done.stdout, re.MULTILINE)
    # Some versions leave the signs in it.
    return job.expand(found[1], number) if found else job.log_file(number)


def value_of(options: SbatchOptions, *names: str) -> str | None:
    """What one of sbatch's options was given, by any of its names; the last time counts."""
    value = None
    for word, *others in options:
        for name in names:
            if word == name:
                value = others[0] if others else None
            elif word.startswith(f"{name}=") or (word.startswith(name) and not name.startswith("--")):
                value = word.removeprefix(name).removeprefix("=")
    return value


def gpus_of_host(options: SbatchOptions, hosts: int) -> int:
    """GPUs that sbatch is asked for on each host, whichever way that is said."""
    gres = [part for part in (value_of(options, "--gres") or "").split(",") if re.split(r"[:(]", part)[0] == "gpu"]
    return (
        sum(map(count_gpus, gres))
        or count_gpus(value_of(options, "--gpus-per-node"))
        or count_gpus(value_of(options, "--gpus", "-G")) // hosts
    )


def count_gpus(text: str | None) -> int:
    """As many as 4, a100:4, a100:2,v100:2 or gpu:a100:4(S:0-1) say; one where there is no number, 0 without a text."""
    counts = [part.partition("(")[0].rpartition(":")[2] for part in (text or "").split(",") if part]
    return sum(int(count) if count.isdecimal() else 1 for count in counts)


def _quoted_for_sbatch(word: str) -> str:
    """A word of an #SBATCH line, which is not a shell's: a backslash is one in every kind of quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _with_number(name: str, job: int | None) -> str:
    return name if job is None else name.replace(JOB, str(job))


def _refuse_line_breaks(word: str) -> None:
    if re.search(r"[\r\n\0]", word):
        raise UsageError(f"{word!r} has a line break in it.", hint="an option in a job's script is one line")

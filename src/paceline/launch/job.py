"""Job: the runs that a set of ranks executes, stored in a file that the launcher writes and the ranks read."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.config import RunConfig, Script
from paceline.launch.channel.messages import from_text, to_text
from paceline.records import RunFolder
from paceline.records.growing_file import full_disk_error
from paceline.records.provenance import command_line
from paceline.records.schema import PRECISION_FILE

JOB_FILE = "job.json"

Task = Literal["train", "prove", "oracle", "prove_oracle", "examine", "examine_machines"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Runs that the same rank processes execute one after the other."""

    folder: RunFolder
    """Folder for the logs and error files of the ranks."""
    runs: tuple[tuple[RunConfig, RunFolder], ...]
    task: Task = "train"
    """Task that the ranks do for each run; a separate task for the oracle of a proof is used for scripts only."""
    script: Script | None = None
    """User's script that replaces the training loop; a job then has one run."""
    oracle: str = ""
    """File with the gradients that the proofs of a script are compared with."""
    timeout: float
    """Seconds after which a rank that waits for others fails."""
    hang_timeout: float = 0.0
    """Seconds without progress of any rank after which the watchdog ends all; 0: never."""
    iface: str | None = None
    threads: int | None = None
    stops_on_request: bool = False
    """Whether its ranks write a checkpoint and end when the launcher asks them to."""
    resume: str = ""
    """Checkpoint, or folder whose newest valid one, the ranks go on from; empty for a run that starts."""
    precision_file: str = ""
    """File with the choices of `--precision auto`, which rank 0 reads and writes; empty if each run chooses anew."""
    command: str = ""
    """Command line of the user."""
    launched_at_s: float = field(default_factory=time.time, compare=False)
    """Unix time at which the job was made, right before its ranks are launched."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique per job, so that a host can detect whether it sees the same file as the leader."""

    @property
    def folders(self) -> list[Path]:
        """Folders that its ranks write to."""
        return [self.folder.path, *[folder.path for _, folder in self.runs]]

    @property
    def file(self) -> Path:
        """File that its ranks read the job from."""
        return self.folder.path / JOB_FILE

    @classmethod
    def single(cls, config: RunConfig, folder: RunFolder, *, iface: str | None, threads: int | None) -> Job:
        """Return a job of one run, which uses the run's folder."""
        return cls(
            folder=folder,
            runs=((config, folder),),
            timeout=config.timeout_s,
            hang_timeout=config.hang_timeout,
            stops_on_request=config.checkpoint_mode != "off",
            iface=iface,
            threads=threads,
            precision_file=str(folder.path / PRECISION_FILE),
            command=command_line(),
        )

    def with_paths(self, replace_path: Callable[[Path], Path]) -> Job:
        """Return the same job with each path replaced by `replace_path(path)`."""
        runs = tuple((config, RunFolder(replace_path(folder.path))) for config, folder in self.runs)
        resume, oracle, precision_file = (
            str(replace_path(Path(text))) if text else "" for text in (self.resume, self.oracle, self.precision_file)
        )
        return replace(
            self,
            folder=RunFolder(replace_path(self.folder.path)),
            runs=runs,
            resume=resume,
            oracle=oracle,
            precision_file=precision_file,
        )

    def restarted(self, config: RunConfig, resume: str) -> Job:
        """Return the next attempt at this job of one run, with its own logs; it goes on from `resume`."""
        ((_, run),) = self.runs
        return replace(
            self,
            folder=run.next_attempt(),
            runs=((config, run),),
            resume=resume,
            launched_at_s=time.time(),
            identity=uuid.uuid4().hex,
        )

    def write(self, file: Path | None = None) -> Path:
        """Write the job to a file, by default its own, and return the file."""
        file = file or self.file
        with full_disk_error(file):
            file.write_text(self.to_json())
        return file

    def to_json(self) -> str:
        """Return the job as JSON."""
        return to_text(self, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Job:
        """Return the job from a file that `write` wrote."""
        return cls.from_json(path.read_text())

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job from the JSON of `to_json`."""
        return from_text(text, cls)

"""A job: what a set of ranks does, as a file that the launcher writes and the ranks read."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.config import RunConfig, Script
from paceline.records import RunFolder
from paceline.records.provenance import command_line

JOB_FILE = "job.json"

Task = Literal["train", "prove", "oracle", "prove_oracle", "examine", "examine_machines"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Runs that the same processes do one after the other."""

    folder: RunFolder
    """Where logs and errors of the ranks go."""
    runs: tuple[tuple[RunConfig, RunFolder], ...]
    task: Task = "train"
    """What is done with each of them; the oracle of a proof is a task of its own for scripts only."""
    script: Script | None = None
    """The user's own, which takes the place of our training; a job then has one run."""
    oracle: str = ""
    """The file of the gradients that a script's proofs are compared with."""
    timeout: float
    """Seconds after which a rank that waits for others gives up."""
    iface: str | None = None
    threads: int | None = None
    command: str = ""
    """What the user typed."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    """No two jobs have the same: hosts tell by it whether they see the same file."""

    @property
    def folders(self) -> list[Path]:
        """Where its ranks write."""
        return [self.folder.path, *[folder.path for _, folder in self.runs]]

    @property
    def file(self) -> Path:
        """Where its ranks read it."""
        return self.folder.path / JOB_FILE

    @classmethod
    def single(cls, config: RunConfig, folder: RunFolder, *, iface: str | None, threads: int | None) -> Job:
        """One run, whose folder is the job's."""
        return cls(
            folder=folder,
            runs=((config, folder),),
            timeout=config.timeout,
            iface=iface,
            threads=threads,
            command=command_line(),
        )

    def moved(self, to: Callable[[Path], Path]) -> Job:
        """The same with other folders."""
        runs = tuple((config, RunFolder(to(folder.path))) for config, folder in self.runs)
        return replace(self, folder=RunFolder(to(self.folder.path)), runs=runs)

    def write(self) -> Path:
        """Leaves the job where the ranks will read it."""
        self.file.write_text(self.to_json())
        return self.file

    def to_json(self) -> str:
        """The job as a text."""
        content = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("folder", "runs")
        }
        content["runs"] = [{"config": dataclasses.asdict(config), "folder": str(f.path)} for config, f in self.runs]
        return json.dumps(content, indent=2, default=dataclasses.asdict) + "\n"

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` wrote."""
        return cls.from_json(path.read_text(), path.parent)

    @classmethod
    def from_json(cls, text: str, folder: Path) -> Job:
        """Reads what `to_json` gave, for a folder."""
        content = json.loads(text)
        runs = tuple((RunConfig(**run["config"]), RunFolder(Path(run["folder"]))) for run in content.pop("runs"))
        script = content.pop("script")
        if script is not None:
            script = Script(path=script["path"], args=tuple(script["args"]), settings=tuple(script["settings"]))
        return cls(folder=RunFolder(folder), runs=runs, script=script, **content)

"""`compare`: proves the contenders, then measures them interleaved until the answer is clear."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.analysis.comparison import Comparison
from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.pool import pool
from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.errors import DataError, LaunchError, PacelineError, UsageError
from paceline.experiments.checks import ranks_on_this_host
from paceline.experiments.contenders import Entrant, make_entrants, reference_of, shared_settings
from paceline.experiments.estimate import estimate_s
from paceline.experiments.names import prepare_data
from paceline.experiments.train import new_folder, started_by_a_launcher
from paceline.launch.elastic import launch as launch_ranks
from paceline.launch.job import Job, Task
from paceline.records import EventWriter, RunFolder, provenance
from paceline.records.experiment import ExperimentFolder, read_experiment
from paceline.records.provenance import command_line
from paceline.records.reader import read_json
from paceline.records.schema import FINISHED_FILE, PARITY_FILE
from paceline.training.parity import Parity

DEFAULT_STEPS = 40


@dataclass(frozen=True)
class Turn:
    """A contender's turn in a repeat: what it is called, and the folder of its run."""

    name: str
    folder: Path


class Board(Protocol):
    """Where the experiment says what goes on, while it does."""

    def plan(self, design: dict[str, Any], config: RunConfig) -> None:
        """What will be done, and how long it will take."""

    def launch(self, stage: str, turns: Sequence[Turn], steps: int | None) -> Any:
        """Ranks start that take these turns; returns a context manager around it."""

    def proved(self, name: str, parity: dict[str, Any]) -> None:
        """A proof is done."""

    def failed(self, name: str, error: PacelineError) -> None:
        """A contender is out."""

    def look(self, comparison: Comparison, repeats: int) -> None:
        """A repeat is done, and this is what is known."""


@dataclass
class Experiment:
    """A comparison while it goes on."""

    entrants: list[Entrant]
    launch: LaunchConfig
    ranks: int
    config: CompareConfig
    folder: ExperimentFolder
    board: Board
    out: set[str] = field(default_factory=set)
    """Contenders that have failed."""
    first_error: PacelineError | None = None

    def __post_init__(self) -> None:
        self.events = EventWriter(self.folder)

    def run(self) -> None:
        """Proves, then measures until the answer is clear; an interrupt ends it with what there is."""
        try:
            if self.config.proof:
                self._prove()
            self._measure()
            self.events.write("end")
        except KeyboardInterrupt:
            self.events.write("interrupted")
            raise
        finally:
            self.events.close()

    def _prove(self) -> None:
        turns = [(entrant, self.folder.path / "proof" / self._slug(entrant)) for entrant in self._still_in()]
        self._take_turns("prove", "proof", turns)
        for entrant, path in turns:
            if not (path / PARITY_FILE).is_file():
                continue
            found = read_json(path / PARITY_FILE)
            name = entrant.contender.name
            self.events.write("parity", contender=name, **found)
            self.board.proved(name, found)
            if found["lossless"]:
                values = {field.name: found[field.name] for field in dataclasses.fields(Parity)}
                values["error"] = float("inf") if values["error"] is None else values["error"]
                Parity(**values | {"strategy": name}).check()

    def _measure(self) -> None:
        for repeat in range(max(self.config.repeats, self.config.max_repeats)):
            self._repeat(repeat)
            comparison = compare_records(pool([read_experiment(self.folder.path)]))
            self.board.look(comparison, repeat + 1)
            if repeat + 1 >= self.config.repeats and comparison.decision.outcome != "open":
                return

    def _repeat(self, repeat: int) -> None:
        """Every contender once, in rotated order, from the same seed."""
        entrants = self._still_in()
        start = repeat % len(entrants)
        parent = self.folder.path / f"repeat-{repeat + 1}"
        turns = [
            (
                Entrant(e.contender, replace(e.config, seed=e.config.seed + repeat)),
                parent / self._slug(e),
            )
            for e in entrants[start:] + entrants[:start]
        ]
        for entrant, path in turns:
            where = path.relative_to(self.folder.path)
            self.events.write("run", contender=entrant.contender.name, repeat=repeat, folder=str(where))
        self._take_turns("train", f"repeat {repeat + 1}", turns)

    def _take_turns(self, task: Task, stage: str, turns: list[tuple[Entrant, Path]]) -> None:
        """Starts ranks that take all turns; after a failure, new ranks for the turns behind the one that failed."""
        attempt = 1
        while turns:
            parent = turns[0][1].parent
            job_folder = RunFolder.create(parent if attempt == 1 else parent / f"restart-{attempt - 1}")
            for _, path in turns:
                path.mkdir(parents=True, exist_ok=True)
            job = Job(
                folder=job_folder,
                runs=tuple((entrant.config, RunFolder(path)) for entrant, path in turns),
                task=task,
                timeout=turns[0][0].config.timeout,
                iface=self.launch.iface,
                threads=self.launch.threads,
                command=command_line(),
            )
            shown = [Turn(entrant.contender.name, path) for entrant, path in turns]
            try:
                with self.board.launch(stage, shown, turns[0][0].config.steps):
                    launch_ranks(job, self.launch, self.ranks)
                return
            except (DataError, LaunchError):
                raise
            except PacelineError as error:
                done = [(path / FINISHED_FILE).exists() for _, path in turns]
                failed = done.index(False)
                self._fail(turns[failed][0], stage, error)
                turns = turns[failed + 1 :]
                attempt += 1

    def _fail(self, entrant: Entrant, stage: str, error: PacelineError) -> None:
        name = entrant.contender.name
        self.out.add(name)
        self.first_error = self.first_error or error
        self.events.write(
            "failure", contender=name, stage=stage, kind=type(error).__name__, message=str(error), hint=error.hint
        )
        self.board.failed(name, error)

    def _slug(self, entrant: Entrant) -> str:
        """A folder name that tells contenders apart, whatever they are called."""
        number = 1 + [other.contender.name for other in self.entrants].index(entrant.contender.name)
        return f"{number}-" + re.sub(r"[^A-Za-z0-9_=.]+", "-", entrant.contender.name).strip("-")

    def _still_in(self) -> list[Entrant]:
        entrants = [entrant for entrant in self.entrants if entrant.contender.name not in self.out]
        if not entrants:
            assert self.first_error is not None
            raise self.first_error
        return entrants


def compare(
    base: RunConfig,
    launch: LaunchConfig,
    config: CompareConfig,
    out: Path | None,
    board: Board,
    tell_folder: Callable[[Path], None],
) -> None:
    """Runs a whole comparison. Its folder, told as soon as it is there, holds what was done even after an interrupt."""
    if launch.hosts > 1 or started_by_a_launcher():
        raise UsageError("compare starts all its ranks itself, on one host.", hint="leave out --hosts, and torchrun")
    if base.steps is None and base.epochs is None:
        base = replace(base, steps=DEFAULT_STEPS)
    ranks = ranks_on_this_host(base, launch)
    entrants = make_entrants(base, config, ranks)
    for entrant in entrants:
        prepare_data(entrant.config)
    contenders = [entrant.contender for entrant in entrants]
    path = out or new_folder(base, "compare")
    design = {
        "ranks": ranks,
        "repeats": config.repeats,
        "max_repeats": config.max_repeats,
        "looks": config.looks,
        "reference": reference_of(contenders),
        "proof": config.proof,
        "estimate_s": estimate_s(entrants, ranks, config.repeats, proof=config.proof),
    }
    folder = ExperimentFolder.create(
        path,
        kind="compare",
        contenders=contenders,
        config=shared_settings(base, entrants),
        design=design,
        provenance=provenance(),
    )
    tell_folder(folder.path)
    board.plan(design | {"contenders": [contender.name for contender in contenders]}, entrants[0].config)
    Experiment(entrants, launch, ranks, config, folder, board).run()

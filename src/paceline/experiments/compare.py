"""`compare`: proves the contenders, then measures them interleaved until the answer is clear."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.analysis.comparison import Comparison
from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.findings import Finding, findings
from paceline.analysis.pool import pool
from paceline.config import CompareConfig, LaunchConfig, RunConfig, launched
from paceline.errors import DataError, LaunchError, PacelineError, UsageError
from paceline.experiments.checks import ranks_on_this_host
from paceline.experiments.contenders import Entrant, make_entrants, reference_of, varied_keys
from paceline.experiments.doctor import examine
from paceline.experiments.subjects import Subject, Turn, Unproven, choose_subject, read_parity
from paceline.experiments.train import new_folder
from paceline.launch.elastic import launch as launch_ranks
from paceline.launch.job import Job, Task
from paceline.measure.cores import threads_per_rank
from paceline.records import EventWriter, RunFolder, provenance
from paceline.records.examination import write_examination
from paceline.records.experiment import ExperimentFolder, read_experiment
from paceline.records.provenance import command_line
from paceline.records.reader import read_json
from paceline.records.schema import FINISHED_FILE, PARITY_FILE
from paceline.training.windows import WARM_UP_STEPS

DEFAULT_STEPS = 40


class Board(Protocol):
    """Where the experiment says what goes on, while it does."""

    def plan(self, design: dict[str, Any], config: RunConfig) -> None:
        """What will be done, and how long it will take."""

    def launch(self, stage: str, turns: Sequence[Turn], steps: int | None) -> Any:
        """Ranks start that take these turns; returns a context manager around it."""

    def proved(self, name: str, parity: dict[str, Any]) -> None:
        """A proof is done."""

    def unproven(self, reason: str) -> None:
        """Nothing can be proven."""

    def examine(self, folder: Path) -> AbstractContextManager[Any]:
        """The machine is examined; returns a context manager around it."""

    def examined(self, found: Sequence[Finding]) -> None:
        """And this was found."""

    def unexamined(self, reason: str) -> None:
        """Nothing could be found out about the machine."""

    def failed(self, name: str, error: PacelineError) -> None:
        """A contender is out."""

    def look(self, comparison: Comparison, repeats: int) -> None:
        """A repeat is done, and this is what is known."""


@dataclass
class Experiment:
    """A comparison while it goes on."""

    subject: Subject
    entrants: list[Entrant]
    launch_config: LaunchConfig
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
            if self.config.doctor:
                self._examine()
            if self.config.proof:
                self._prove()
            self._measure()
            self.events.write("end")
        except KeyboardInterrupt:
            self.events.write("interrupted")
            raise
        finally:
            self.events.close()

    def _examine(self) -> None:
        """Finds out what the machine and the link can do; the comparison goes on without it."""
        folder = self.folder.path / "doctor"
        shared = next((e for e in self.entrants if e.contender.role == "candidate"), self.entrants[0])
        try:
            with self.board.examine(folder):
                found = examine(
                    shared.config, self.launch_config, self.ranks, folder, with_workload=not self.config.script
                )
        except PacelineError as error:
            self.events.write("unexamined", reason=error.message, hint=error.hint)
            self.board.unexamined(error.message)
            return
        assert found is not None, "a comparison has one host"
        write_examination(self.folder.path, found)
        self.board.examined(findings(found))

    def _prove(self) -> None:
        turns = [self._turn(entrant, "proof") for entrant in self._still_in()]
        try:
            self.subject.prove(turns, self)
        except Unproven as reason:
            self.events.write("unproven", reason=str(reason))
            self.board.unproven(str(reason))
            return
        doubts: dict[str, list[str]] = {}
        for turn in turns:
            parity = read_parity(turn.folder)
            if parity is None:
                continue
            if parity.unproven:
                doubts.setdefault(parity.unproven, []).append(turn.name)
                continue
            found = read_json(turn.folder / PARITY_FILE)
            self.events.write("parity", contender=turn.name, **found)
            self.board.proved(turn.name, found)
            if found["lossless"]:
                replace(parity, strategy=turn.name).check()
        for doubt, names in doubts.items():
            sentence = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} measured unproven: {doubt}"
            self.events.write("unproven", contenders=names, reason=sentence)
            self.board.unproven(sentence)

    def _measure(self) -> None:
        for repeat in range(max(self.config.repeats, self.config.max_repeats)):
            self._repeat(repeat)
            comparison = compare_records(pool([read_experiment(self.folder.path)]))
            if self.first_error is not None and all(row.step_s is None for row in comparison.rows):
                raise self.first_error
            self.board.look(comparison, repeat + 1)
            if repeat + 1 >= self.config.repeats and comparison.decision.outcome != "open":
                return

    def _repeat(self, repeat: int) -> None:
        """Every contender once, in rotated order, from the same seed."""
        entrants = self._still_in()
        start = repeat % len(entrants)
        turns = []
        for entrant in entrants[start:] + entrants[:start]:
            seeded = replace(entrant, config=replace(entrant.config, seed=entrant.config.seed + repeat))
            turns.append(self._turn(seeded, f"repeat-{repeat + 1}"))
        for turn in turns:
            where = turn.folder.relative_to(self.folder.path)
            self.events.write("run", contender=turn.name, repeat=repeat, folder=str(where))
        self.take_turns("train", f"repeat {repeat + 1}", turns)

    def take_turns(self, task: Task, stage: str, turns: Sequence[Turn], oracle: str = "") -> None:
        """Has ranks take all turns; a contender that fails is out."""
        for folder, together in self.subject.together(turns):
            self._take_together(task, stage, folder, together, oracle)

    def _take_together(self, task: Task, stage: str, folder: Path, turns: list[Turn], oracle: str) -> None:
        """Starts ranks that take the turns; after a failure, new ranks for the turns behind the one that failed."""
        attempt = 1
        while turns:
            try:
                self.launch(task, stage, folder if attempt == 1 else folder / f"restart-{attempt - 1}", turns, oracle)
                return
            except (DataError, LaunchError):
                raise
            except PacelineError as error:
                failed = _failed(error, turns)
                self._fail(turns[failed].entrant, stage, error)
                turns = turns[failed + 1 :]
                attempt += 1

    def launch(self, task: Task, stage: str, folder: Path, turns: Sequence[Turn], oracle: str = "") -> None:
        """Starts ranks that take these turns; raises where one fails."""
        job_folder = RunFolder.create(folder)
        for turn in turns:
            turn.folder.mkdir(parents=True, exist_ok=True)
        config = turns[0].entrant.config
        job = Job(
            folder=job_folder,
            runs=tuple((turn.entrant.config, RunFolder(turn.folder)) for turn in turns),
            task=task,
            script=self.subject.script_of(turns[0]),
            oracle=oracle,
            timeout=config.timeout,
            iface=self.launch_config.iface,
            threads=self.launch_config.threads,
            command=command_line(),
        )
        with self.board.launch(stage, turns, config.steps):
            launch_ranks(job, self.launch_config, self.subject.ranks_of(turns[0], self.ranks))

    def _fail(self, entrant: Entrant, stage: str, error: PacelineError) -> None:
        name = entrant.contender.name
        self.out.add(name)
        self.first_error = self.first_error or error
        self.events.write(
            "failure", contender=name, stage=stage, kind=type(error).__name__, message=str(error), hint=error.hint
        )
        self.board.failed(name, error)

    def _turn(self, entrant: Entrant, stage: str) -> Turn:
        return Turn(entrant.contender.name, entrant, self.folder.path / stage / self._slug(entrant))

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


def _failed(error: PacelineError, turns: Sequence[Turn]) -> int:
    """Whose turn it was: the ranks said so, or else the first that did not come to its end."""
    if error.run is not None:
        return error.run
    done = [(turn.folder / FINISHED_FILE).exists() for turn in turns]
    return done.index(False) if False in done else len(turns) - 1


def compare(
    base: RunConfig,
    launch: LaunchConfig,
    config: CompareConfig,
    out: Path | None,
    board: Board,
    tell_folder: Callable[[Path], None],
    script_args: Sequence[str] = (),
) -> None:
    """Runs a whole comparison. Its folder, told as soon as it is there, holds what was done even after an interrupt."""
    if launch.hosts > 1 or launched():
        raise UsageError("compare starts all its ranks itself, on one host.", hint="leave out --hosts, and torchrun")
    subject, base = choose_subject(base, config, script_args)
    if base.steps is None and base.epochs is None and not varied_keys(config) & {"steps", "epochs"}:
        base = replace(base, steps=DEFAULT_STEPS)
    ranks = ranks_on_this_host(base, launch)
    entrants = make_entrants(base, config, ranks, subject.rules)
    too_few = [e.config.steps for e in entrants if e.config.steps is not None and e.config.steps <= WARM_UP_STEPS]
    if too_few:
        raise UsageError(
            f"--steps {too_few[0]} leaves nothing to measure: the first {WARM_UP_STEPS} steps warm up.",
            hint="use --steps 40, or leave it out",
        )
    contenders = [entrant.contender for entrant in entrants]
    known = subject.prepare(entrants, ranks, config)
    path = out or new_folder(base, "compare")
    design = {
        "ranks": ranks,
        "threads": launch.threads or threads_per_rank(ranks),
        "threads_asked": launch.threads,
        "repeats": config.repeats,
        "max_repeats": config.max_repeats,
        "looks": config.looks,
        "reference": reference_of(contenders),
        "proof": config.proof,
        **known,
    }
    folder = ExperimentFolder.create(
        path,
        kind="compare",
        contenders=contenders,
        config=subject.settings(entrants),
        design=design,
        provenance=provenance(),
    )
    tell_folder(folder.path)
    board.plan(design | {"contenders": [contender.name for contender in contenders]}, entrants[0].config)
    Experiment(subject, entrants, launch, ranks, config, folder, board).run()

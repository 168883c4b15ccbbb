"""The engine of an experiment: examines, proves, then measures its entrants interleaved until the answer is clear."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.analysis.comparison import Comparison
from paceline.analysis.findings import Finding, findings
from paceline.config import RunConfig
from paceline.errors import DataError, LaunchError, PacelineError
from paceline.experiments.contenders import Entrant
from paceline.experiments.doctor import examine
from paceline.experiments.subjects import Subject, Turn, Unproven, read_parity
from paceline.launch.fleet import Fleet
from paceline.launch.job import Job, Task
from paceline.records import EventWriter, RunFolder
from paceline.records.examination import write_examination
from paceline.records.experiment import ExperimentFolder
from paceline.records.provenance import command_line
from paceline.records.reader import read_json
from paceline.records.schema import FINISHED_FILE, PARITY_FILE
from paceline.strategies.registry import create

Item = TypeVar("Item")


class Measuring(Protocol):
    """What an experiment has to be told about measuring."""

    @property
    def repeats(self) -> int:
        """How often everything is measured at least."""

    @property
    def max_repeats(self) -> int:
        """And at most."""

    @property
    def proof(self) -> bool:
        """Whether strategies are proven first."""

    @property
    def doctor(self) -> bool:
        """Whether the machine is examined first."""


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
class Experiment(ABC):
    """Entrants that are examined, proven and measured together, while that goes on."""

    subject: Subject
    entrants: list[Entrant]
    fleet: Fleet
    config: Measuring
    folder: ExperimentFolder
    board: Board
    out: set[str] = field(default_factory=set)
    """Contenders that have failed."""
    first_error: PacelineError | None = None

    def __post_init__(self) -> None:
        self.events = EventWriter(self.folder)

    @abstractmethod
    def enough(self, repeats: int) -> bool:
        """Looks at what is known after a repeat; whether that is an answer."""

    def to_prove(self) -> list[Entrant]:
        """The entrants whose strategies are proven; where ranks do not step together, no step has one gradient."""
        return [entrant for entrant in self._still_in() if create(entrant.config.strategy).lockstep]

    def threads_of(self, turn: Turn) -> int | None:  # noqa: ARG002
        """Threads that a turn's ranks compute with, the same for all that start together; None for the usual rule."""
        return self.fleet.launch.threads

    def place_of(self, entrant: Entrant) -> str:
        """The name of the folder of all entrants whose ranks start together."""
        return f"{entrant.shape.hosts}x{entrant.shape.ranks_per_host}"

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
        largest = max(entrant.shape.ranks for entrant in self.entrants)
        there = [entrant for entrant in self.entrants if entrant.shape.ranks == largest]
        shared = next((entrant for entrant in there if entrant.contender.role == "candidate"), there[0])
        own_script = self.subject.script_of(self._turn(shared, "doctor")) is not None
        try:
            with self.board.examine(folder):
                found = examine(shared.config, self.fleet, shared.shape, folder, with_workload=not own_script)
        except PacelineError as error:
            self.events.write("unexamined", reason=error.message, hint=error.hint)
            self.board.unexamined(error.message)
            return
        write_examination(self.folder.path, found)
        self.board.examined(findings(found))

    def _prove(self) -> None:
        turns = [self._turn(entrant, "proof") for entrant in self.to_prove()]
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
            if self.enough(repeat + 1):
                return

    def _repeat(self, repeat: int) -> None:
        """Every contender once, in rotated order, from the same seed."""
        turns = []
        for entrant in in_rotated_order(self._still_in(), repeat, self.place_of):
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
            iface=self.fleet.launch.iface,
            threads=self.threads_of(turns[0]),
            command=command_line(),
        )
        with self.board.launch(stage, turns, config.steps):
            self.fleet.run(job, self.subject.shape_of(turns[0]))

    def _fail(self, entrant: Entrant, stage: str, error: PacelineError) -> None:
        name = entrant.contender.name
        self.out.add(name)
        self.first_error = self.first_error or error
        self.events.write(
            "failure", contender=name, stage=stage, kind=type(error).__name__, message=str(error), hint=error.hint
        )
        self.board.failed(name, error)

    def _turn(self, entrant: Entrant, stage: str) -> Turn:
        """Turns of one shape have folders side by side: their ranks start together."""
        folder = self.folder.path / stage
        if len({self.place_of(other) for other in self.entrants}) > 1:
            folder /= self.place_of(entrant)
        return Turn(entrant.contender.name, entrant, folder / self._slug(entrant))

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


def in_rotated_order(
    entrants: Sequence[Entrant], repeat: int, place_of: Callable[[Entrant], Hashable]
) -> list[Entrant]:
    """Those of one place together; in each repeat another place is first, and in it another entrant."""
    places = _rotated(list(dict.fromkeys(map(place_of, entrants))), repeat)
    return [e for place in places for e in _rotated([e for e in entrants if place_of(e) == place], repeat)]


def _rotated(items: list[Item], by: int) -> list[Item]:
    start = by % len(items)
    return items[start:] + items[:start]

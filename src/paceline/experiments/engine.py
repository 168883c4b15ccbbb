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
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.doctor import examine
from paceline.experiments.training_targets import ScheduledRun, TrainingTarget, Unproven, read_parity
from paceline.launch.job import Job, Task
from paceline.launch.leader import Leader
from paceline.records import EventWriter, RunFolder
from paceline.records.examination import write_examination
from paceline.records.experiment import ExperimentFolder
from paceline.records.provenance import command_line
from paceline.records.reader import read_json
from paceline.records.schema import FINISHED_FILE, PARITY_FILE
from paceline.strategies.registry import create

Item = TypeVar("Item")


class MeasurementConfig(Protocol):
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


class ProgressDisplay(Protocol):
    """Where the experiment says what goes on, while it does."""

    def plan(self, design: dict[str, Any], config: RunConfig) -> None:
        """What will be done, and how long it will take."""

    def launch(self, stage: str, schedule: Sequence[ScheduledRun], steps: int | None) -> Any:
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
        """A candidate is out."""

    def look(self, comparison: Comparison, repeats: int) -> None:
        """A repeat is done, and this is what is known."""


@dataclass
class Experiment(ABC):
    """Entrants that are examined, proven and measured together, while that goes on."""

    target: TrainingTarget
    candidate_configs: list[CandidateConfig]
    leader: Leader
    config: MeasurementConfig
    folder: ExperimentFolder
    display: ProgressDisplay
    out: set[str] = field(default_factory=set)
    """Candidates that have failed."""
    first_error: PacelineError | None = None

    def __post_init__(self) -> None:
        self.events = EventWriter(self.folder)

    @abstractmethod
    def enough(self, repeats: int) -> bool:
        """Looks at what is known after a repeat; whether that is an answer."""

    def to_prove(self) -> list[CandidateConfig]:
        """The entrants whose strategies are proven; where ranks do not step together, no step has one gradient."""
        return [
            candidate_config
            for candidate_config in self._still_in()
            if create(candidate_config.config.strategy).lockstep
        ]

    def threads_of(self, scheduled: ScheduledRun) -> int | None:  # noqa: ARG002
        """Threads that a turn's ranks compute with, the same for all that start together; None for the usual rule."""
        return self.leader.launch.threads

    def place_of(self, candidate_config: CandidateConfig) -> str:
        """The name of the folder of all entrants whose ranks start together."""
        return f"{candidate_config.shape.hosts}x{candidate_config.shape.ranks_per_host}"

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
        largest = max(candidate_config.shape.ranks for candidate_config in self.candidate_configs)
        there = [
            candidate_config for candidate_config in self.candidate_configs if candidate_config.shape.ranks == largest
        ]
        shared = next(
            (candidate_config for candidate_config in there if candidate_config.candidate.role == "candidate"), there[0]
        )
        own_script = self.target.script_of(self._schedule(shared, "doctor")) is not None
        try:
            with self.display.examine(folder):
                found = examine(shared.config, self.leader, shared.shape, folder, with_workload=not own_script)
        except PacelineError as error:
            self.events.write("unexamined", reason=error.message, hint=error.hint)
            self.display.unexamined(error.message)
            return
        write_examination(self.folder.path, found)
        self.display.examined(findings(found))

    def _prove(self) -> None:
        schedule = [self._schedule(candidate_config, "proof") for candidate_config in self.to_prove()]
        try:
            self.target.prove(schedule, self)
        except Unproven as reason:
            self.events.write("unproven", reason=str(reason))
            self.display.unproven(str(reason))
            return
        doubts: dict[str, list[str]] = {}
        for scheduled in schedule:
            parity = read_parity(scheduled.folder)
            if parity is None:
                continue
            if parity.unproven:
                doubts.setdefault(parity.unproven, []).append(scheduled.name)
                continue
            found = read_json(scheduled.folder / PARITY_FILE)
            self.events.write("parity", candidate=scheduled.name, **found)
            self.display.proved(scheduled.name, found)
            if found["lossless"]:
                replace(parity, strategy=scheduled.name).check()
        for doubt, names in doubts.items():
            sentence = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} measured unproven: {doubt}"
            self.events.write("unproven", candidates=names, reason=sentence)
            self.display.unproven(sentence)

    def _measure(self) -> None:
        for repeat in range(max(self.config.repeats, self.config.max_repeats)):
            self._repeat(repeat)
            if self.enough(repeat + 1):
                return

    def _repeat(self, repeat: int) -> None:
        """Every candidate once, in rotated order, from the same seed."""
        schedule = []
        for candidate_config in in_rotated_order(self._still_in(), repeat, self.place_of):
            seeded = replace(
                candidate_config, config=replace(candidate_config.config, seed=candidate_config.config.seed + repeat)
            )
            schedule.append(self._schedule(seeded, f"repeat-{repeat + 1}"))
        for scheduled in schedule:
            where = scheduled.folder.relative_to(self.folder.path)
            self.events.write("run", candidate=scheduled.name, repeat=repeat, folder=str(where))
        self.run_in_order("train", f"repeat {repeat + 1}", schedule)

    def run_in_order(self, task: Task, stage: str, schedule: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Has ranks take all turns; a candidate that fails is out."""
        for folder, together in self.target.together(schedule):
            self._run_together(task, stage, folder, together, oracle)

    def _run_together(self, task: Task, stage: str, folder: Path, schedule: list[ScheduledRun], oracle: str) -> None:
        """Starts ranks that take the turns; after a failure, new ranks for the turns behind the one that failed."""
        attempt = 1
        while schedule:
            try:
                self.launch(
                    task, stage, folder if attempt == 1 else folder / f"restart-{attempt - 1}", schedule, oracle
                )
                return
            except (DataError, LaunchError):
                raise
            except PacelineError as error:
                failed = _failed(error, schedule)
                self._fail(schedule[failed].candidate_config, stage, error)
                schedule = schedule[failed + 1 :]
                attempt += 1

    def launch(self, task: Task, stage: str, folder: Path, schedule: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Starts ranks that take these turns; raises where one fails."""
        job_folder = RunFolder.create(folder)
        for scheduled in schedule:
            scheduled.folder.mkdir(parents=True, exist_ok=True)
        config = schedule[0].candidate_config.config
        job = Job(
            folder=job_folder,
            runs=tuple((scheduled.candidate_config.config, RunFolder(scheduled.folder)) for scheduled in schedule),
            task=task,
            script=self.target.script_of(schedule[0]),
            oracle=oracle,
            timeout=config.timeout,
            iface=self.leader.launch.iface,
            threads=self.threads_of(schedule[0]),
            command=command_line(),
        )
        with self.display.launch(stage, schedule, config.steps):
            self.leader.run(job, self.target.shape_of(schedule[0]))

    def _fail(self, candidate_config: CandidateConfig, stage: str, error: PacelineError) -> None:
        name = candidate_config.candidate.name
        self.out.add(name)
        self.first_error = self.first_error or error
        self.events.write(
            "failure", candidate=name, stage=stage, kind=type(error).__name__, message=str(error), hint=error.hint
        )
        self.display.failed(name, error)

    def _schedule(self, candidate_config: CandidateConfig, stage: str) -> ScheduledRun:
        """Turns of one shape have folders side by side: their ranks start together."""
        folder = self.folder.path / stage
        if len({self.place_of(other) for other in self.candidate_configs}) > 1:
            folder /= self.place_of(candidate_config)
        return ScheduledRun(candidate_config.candidate.name, candidate_config, folder / self._slug(candidate_config))

    def _slug(self, candidate_config: CandidateConfig) -> str:
        """A folder name that tells candidates apart, whatever they are called."""
        number = 1 + [other.candidate.name for other in self.candidate_configs].index(candidate_config.candidate.name)
        return f"{number}-" + re.sub(r"[^A-Za-z0-9_=.]+", "-", candidate_config.candidate.name).strip("-")

    def _still_in(self) -> list[CandidateConfig]:
        candidate_configs = [
            candidate_config
            for candidate_config in self.candidate_configs
            if candidate_config.candidate.name not in self.out
        ]
        if not candidate_configs:
            assert self.first_error is not None
            raise self.first_error
        return candidate_configs


def _failed(error: PacelineError, schedule: Sequence[ScheduledRun]) -> int:
    """Whose turn it was: the ranks said so, or else the first that did not come to its end."""
    if error.run is not None:
        return error.run
    done = [(scheduled.folder / FINISHED_FILE).exists() for scheduled in schedule]
    return done.index(False) if False in done else len(schedule) - 1


def in_rotated_order(
    candidate_configs: Sequence[CandidateConfig], repeat: int, place_of: Callable[[CandidateConfig], Hashable]
) -> list[CandidateConfig]:
    """Those of one place together; in each repeat another place is first, and in it another entrant."""
    places = _rotated(list(dict.fromkeys(map(place_of, candidate_configs))), repeat)
    return [e for place in places for e in _rotated([e for e in candidate_configs if place_of(e) == place], repeat)]


def _rotated(items: list[Item], by: int) -> list[Item]:
    start = by % len(items)
    return items[start:] + items[:start]

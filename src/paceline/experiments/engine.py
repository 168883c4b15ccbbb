"""The engine of an experiment: examine the machine, prove parity, then measure all candidates interleaved."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from paceline.analysis.comparison import Comparison
from paceline.analysis.findings import Finding, findings
from paceline.config import RunConfig
from paceline.errors import DataError, LaunchError, PacelineError, RankError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.doctor import examine
from paceline.experiments.training_targets import ScheduledRun, TrainingTarget, Unproven, read_parity
from paceline.launch.job import Job, Task
from paceline.launch.leader import Leader
from paceline.records import EventWriter, RunFolder
from paceline.records.events import (
    EndEvent,
    FailureEvent,
    InterruptedEvent,
    ParityEvent,
    ScheduledEvent,
    UnexaminedEvent,
    UnprovenEvent,
)
from paceline.records.examination import write_examination
from paceline.records.experiment import Design, ExperimentFolder
from paceline.records.parity import Parity
from paceline.records.provenance import command_line
from paceline.records.schema import FINISHED_FILE
from paceline.strategies.registry import create

Item = TypeVar("Item")


class MeasurementConfig(Protocol):
    """Settings of an experiment that say how often to measure, and what to do before."""

    @property
    def repeats(self) -> int:
        """Least number of repeats."""

    @property
    def max_repeats(self) -> int:
        """Largest number of repeats."""

    @property
    def proof(self) -> bool:
        """Whether to prove parity first."""

    @property
    def doctor(self) -> bool:
        """Whether to examine the machine first."""


class ProgressDisplay(Protocol):
    """Display of an experiment in progress; the engine calls these methods as things happen."""

    def plan(self, design: Design, candidates: Sequence[str], config: RunConfig) -> None:
        """Show what will be measured, and the estimated time."""

    def launch(self, stage: str, runs: Sequence[ScheduledRun], steps: int | None) -> Any:
        """Return a context manager to enter while ranks carry out these runs."""

    def proved(self, name: str, parity: Parity) -> None:
        """Show the result of one parity proof."""

    def unproven(self, reason: str) -> None:
        """Show why parity cannot be proven."""

    def examine(self, folder: Path) -> AbstractContextManager[Any]:
        """Return a context manager to enter while the machine is examined."""

    def examined(self, found: Sequence[Finding]) -> None:
        """Show the findings of the examination."""

    def unexamined(self, reason: str) -> None:
        """Show why the machine could not be examined."""

    def failed(self, name: str, error: PacelineError) -> None:
        """Show that a candidate failed and is left out from now on."""

    def refresh(self, comparison: Comparison, repeats: int) -> None:
        """Show the results after a repeat."""


@dataclass
class Experiment(ABC):
    """An experiment in progress: candidates that are proven and measured together."""

    target: TrainingTarget
    candidate_configs: list[CandidateConfig]
    leader: Leader
    config: MeasurementConfig
    folder: ExperimentFolder
    display: ProgressDisplay
    failed_names: set[str] = field(default_factory=set)
    """Candidates that have failed."""
    first_error: PacelineError | None = None

    def __post_init__(self) -> None:
        self.events = EventWriter(self.folder)

    @abstractmethod
    def enough(self, repeats: int) -> bool:
        """Show the results after a repeat; return whether no further repeat is needed."""

    def to_prove(self) -> list[CandidateConfig]:
        """Return the candidates to prove: all but asynchronous ones, which have no common gradient per step."""
        return [one for one in self._still_in() if create(one.config.strategy).lockstep]

    def threads_of(self, run: ScheduledRun) -> int | None:  # noqa: ARG002
        """Return the threads per rank of a run (equal for runs in one launch); None for cores ÷ ranks."""
        return self.leader.launch.threads

    def place_of(self, candidate_config: CandidateConfig) -> str:
        """Return the folder name of all candidates whose runs share a launch."""
        return f"{candidate_config.shape.hosts}x{candidate_config.shape.ranks_per_host}"

    def run(self) -> None:
        """Examine, prove and measure until the answer is clear; an interrupt keeps what was measured."""
        try:
            if self.config.doctor:
                self._examine()
            if self.config.proof:
                self._prove()
            self._measure()
            self.events.write(EndEvent())
        except KeyboardInterrupt:
            self.events.write(InterruptedEvent())
            raise
        finally:
            self.events.close()

    def _examine(self) -> None:
        """Examine the machine and the link; if that fails, the experiment continues without it."""
        folder = self.folder.path / "doctor"
        largest = max(one.shape.ranks for one in self.candidate_configs)
        largest_ones = [one for one in self.candidate_configs if one.shape.ranks == largest]
        examined = next((one for one in largest_ones if one.candidate.role == "candidate"), largest_ones[0])
        is_script = self.target.script_of(self._scheduled_run(examined, "doctor")) is not None
        try:
            with self.display.examine(folder):
                found = examine(examined.config, self.leader, examined.shape, folder, with_workload=not is_script)
        except PacelineError as error:
            self.events.write(UnexaminedEvent(reason=error.message, hint=error.hint))
            self.display.unexamined(error.message)
            return
        write_examination(self.folder.path, found)
        self.display.examined(findings(found))

    def _prove(self) -> None:
        runs = [self._scheduled_run(one, "proof") for one in self.to_prove()]
        try:
            self.target.prove(runs, self)
        except Unproven as reason:
            self.events.write(UnprovenEvent(reason=str(reason)))
            self.display.unproven(str(reason))
            return
        unproven: dict[str, list[str]] = {}
        for run in runs:
            parity = read_parity(run.folder)
            if parity is None:
                continue
            if parity.unproven:
                unproven.setdefault(parity.unproven, []).append(run.name)
                continue
            self.events.write(ParityEvent(candidate=run.name, **msgspec.structs.asdict(parity)))
            self.display.proved(run.name, parity)
            if parity.lossless:
                msgspec.structs.replace(parity, strategy=run.name).check()
        for reason_text, names in unproven.items():
            verb = "is" if len(names) == 1 else "are"
            message = f"{', '.join(names)} {verb} measured without a parity proof: {reason_text}"
            self.events.write(UnprovenEvent(candidates=names, reason=message))
            self.display.unproven(message)

    def _measure(self) -> None:
        for repeat in range(max(self.config.repeats, self.config.max_repeats)):
            self._repeat(repeat)
            if self.enough(repeat + 1):
                return

    def _repeat(self, repeat: int) -> None:
        """Train every candidate once, in rotated order, with the same seed."""
        runs = []
        for candidate_config in in_rotated_order(self._still_in(), repeat, self.place_of):
            seeded = replace(
                candidate_config, config=replace(candidate_config.config, seed=candidate_config.config.seed + repeat)
            )
            runs.append(self._scheduled_run(seeded, f"repeat-{repeat + 1}"))
        for run in runs:
            where = run.folder.relative_to(self.folder.path)
            self.events.write(ScheduledEvent(candidate=run.name, repeat=repeat, folder=str(where)))
        self.run_in_order("train", f"repeat {repeat + 1}", runs)

    def run_in_order(self, task: Task, stage: str, runs: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Start ranks for all runs; a candidate that fails is left out from now on."""
        for folder, together in self.target.together(runs):
            self._run_together(task, stage, folder, together, oracle)

    def _run_together(self, task: Task, stage: str, folder: Path, runs: list[ScheduledRun], oracle: str) -> None:
        """Start ranks for runs that share a launch; after a failure, start new ranks for the runs that remain."""
        attempt = 1
        while runs:
            try:
                self.launch(task, stage, folder if attempt == 1 else folder / f"restart-{attempt - 1}", runs, oracle)
                return
            except (DataError, LaunchError):
                raise
            except PacelineError as error:
                failed = _failed_index(error, runs)
                self._fail(runs[failed].candidate_config, stage, error)
                runs = runs[failed + 1 :]
                attempt += 1

    def launch(self, task: Task, stage: str, folder: Path, runs: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Start ranks that carry out these runs one after the other; raise if one fails."""
        job_folder = RunFolder.create(folder)
        for run in runs:
            run.folder.mkdir(parents=True, exist_ok=True)
        config = runs[0].candidate_config.config
        job = Job(
            folder=job_folder,
            runs=tuple((run.candidate_config.config, RunFolder(run.folder)) for run in runs),
            task=task,
            script=self.target.script_of(runs[0]),
            oracle=oracle,
            timeout=config.timeout,
            iface=self.leader.launch.iface,
            threads=self.threads_of(runs[0]),
            command=command_line(),
        )
        with self.display.launch(stage, runs, config.steps):
            self.leader.run(job, self.target.shape_of(runs[0]))

    def _fail(self, candidate_config: CandidateConfig, stage: str, error: PacelineError) -> None:
        name = candidate_config.candidate.name
        self.failed_names.add(name)
        self.first_error = self.first_error or error
        self.events.write(
            FailureEvent(
                candidate=name,
                stage=stage,
                kind=type(error).__name__,
                message=str(error),
                hint=error.hint,
                out_of_memory=isinstance(error, RankError) and error.out_of_memory,
            )
        )
        self.display.failed(name, error)

    def _scheduled_run(self, candidate_config: CandidateConfig, stage: str) -> ScheduledRun:
        """Return a candidate's run in a stage; runs that share a launch have sibling folders."""
        folder = self.folder.path / stage
        if len({self.place_of(other) for other in self.candidate_configs}) > 1:
            folder /= self.place_of(candidate_config)
        return ScheduledRun(candidate_config.candidate.name, candidate_config, folder / self._slug(candidate_config))

    def _slug(self, candidate_config: CandidateConfig) -> str:
        """Return a folder name that is unique among the candidates."""
        number = 1 + [other.candidate.name for other in self.candidate_configs].index(candidate_config.candidate.name)
        return f"{number}-" + re.sub(r"[^A-Za-z0-9_=.]+", "-", candidate_config.candidate.name).strip("-")

    def _still_in(self) -> list[CandidateConfig]:
        """Return the candidates that have not failed; raise the first error if none is left."""
        remaining = [one for one in self.candidate_configs if one.candidate.name not in self.failed_names]
        if not remaining:
            assert self.first_error is not None
            raise self.first_error
        return remaining


def _failed_index(error: PacelineError, runs: Sequence[ScheduledRun]) -> int:
    """Return the index of the run that failed: as reported by the ranks, else the first that did not finish."""
    if error.run is not None:
        return error.run
    done = [(run.folder / FINISHED_FILE).exists() for run in runs]
    return done.index(False) if False in done else len(runs) - 1


def in_rotated_order(
    candidate_configs: Sequence[CandidateConfig], repeat: int, place_of: Callable[[CandidateConfig], Hashable]
) -> list[CandidateConfig]:
    """Order candidates by launch; each repeat starts with another launch, and in it with another candidate."""
    places = _rotated(list(dict.fromkeys(map(place_of, candidate_configs))), repeat)
    return [e for place in places for e in _rotated([e for e in candidate_configs if place_of(e) == place], repeat)]


def _rotated(items: list[Item], by: int) -> list[Item]:
    start = by % len(items)
    return items[start:] + items[:start]

"""The engine of an experiment: examine the machine, prove parity, then measure all candidates interleaved."""

from __future__ import annotations

import itertools
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from paceline.analysis.comparison import Comparison
from paceline.analysis.findings import Finding, findings
from paceline.analysis.remaining_time import Part, PartKind, TimeEstimator
from paceline.config import RunConfig
from paceline.errors import DataError, DivergenceError, LaunchError, PacelineError, RankError, RecordError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.doctor import examine
from paceline.experiments.estimate import RUN_S, launch_part
from paceline.experiments.training_targets import ScheduledRun, TrainingTarget, Unproven, read_parity
from paceline.launch.job import JOB_FILE, Job, Task
from paceline.launch.leader import Leader
from paceline.records import EventWriter, RunFolder, provenance
from paceline.records.events import (
    RUN_EVENTS,
    ContinuedEvent,
    EndEvent,
    FailureEvent,
    InterruptedEvent,
    ParityEvent,
    RunEvent,
    ScheduledEvent,
    UnexaminedEvent,
    UnprovenEvent,
    events_of,
    read_events,
)
from paceline.records.examination import Examination, has_examination, write_examination
from paceline.records.experiment.design import Design
from paceline.records.experiment.folder import EarlierParts, ExperimentFolder
from paceline.records.parity import Parity
from paceline.records.provenance import command_line
from paceline.records.schema import CHECKPOINTS_FOLDER, EVENTS_FILE, FINISHED_FILE, PRECISION_FILE, READY_FILE
from paceline.strategies.registry import create

Item = TypeVar("Item")
_BEGUN_REPEATS, _REPEATS = "begun repeats", "further repeats"


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
        """Show what will be measured."""

    def follow_time(self, estimator: TimeEstimator) -> None:
        """Show the estimated time of the experiment, and from now on the remaining time."""

    def continued(self, folder: Path, runs: int, planned: int, failed: Sequence[str], repeats: int) -> None:
        """Show that an experiment goes on: complete and planned runs, candidates to try again, repeats begun."""

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

    def failed(self, name: str, error: PacelineError, *, left_out: bool) -> None:
        """Show that a candidate failed, and whether it is left out from now on."""

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
    estimator: TimeEstimator = field(default_factory=TimeEstimator)
    """Estimate of the remaining time, which this experiment keeps up to date."""

    def __post_init__(self) -> None:
        earlier = self.folder.earlier
        self.events = EventWriter(self.folder, continued_s=None if earlier is None else earlier.last_event_s)

    @abstractmethod
    def enough(self, repeats: int) -> bool:
        """Show the results after a repeat; return whether no further repeat is needed."""

    def leaves_out(self, error_kind: str) -> bool:  # noqa: ARG002
        """Return whether a candidate is left out of later repeats after an error, named by its class."""
        return True

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
        """Examine, prove and measure until the answer is clear; an interrupt keeps what was measured.

        What an earlier command has completed in the folder is kept: the examination, proofs and runs.
        """
        try:
            if self.folder.earlier is not None:
                self._continue(self.folder.earlier)
            self._expect_all()
            self.display.follow_time(self.estimator)
            self._write_estimate()
            if self._is_to_examine:
                self._examine()
                self._write_estimate()
            if self._is_to_prove:
                self._prove()
                self._write_estimate()
            self._measure()
            self.events.write(EndEvent())
        except KeyboardInterrupt:
            self.events.write(InterruptedEvent())
            raise
        finally:
            self.events.close()
            self.folder.close()

    def _continue(self, earlier: EarlierParts) -> None:
        """Announce that the experiment goes on, and move aside what is incomplete."""
        self.events.write(ContinuedEvent(provenance=provenance(), kept=sorted(earlier.kept), retried=earlier.failed))
        for failure in earlier.diverged:
            if not self.leaves_out(failure.kind):
                continue
            self.failed_names.add(failure.candidate)
            self.first_error = self.first_error or DivergenceError(failure.message, hint=failure.hint)
        kept_of_diverged = [event for event in earlier.kept.values() if event.candidate in self.failed_names]
        still_in = len(self.candidate_configs) - len(self.failed_names)
        planned = still_in * max(self.config.repeats, earlier.repeats) + len(kept_of_diverged)
        self.display.continued(self.folder.path, len(earlier.kept), planned, earlier.failed, earlier.repeats)
        for event in events_of(earlier.events, ScheduledEvent):
            if event.folder not in earlier.kept:
                self.folder.set_aside(self.folder.path / event.folder)
        for candidate_config in self.candidate_configs:
            if candidate_config.candidate.name in earlier.reproved:
                self.folder.set_aside(self._scheduled_run(candidate_config, "proof").folder)
        self._measure_kept(earlier)

    def expect_repeats(self, done: int, *, at_least: int = 0, at_most: int | None = None) -> None:
        """Update the estimate of the remaining time after a number of repeats, with the repeats still to come.

        Of repeats that an earlier command began, only the runs that it did not complete are to come.
        """
        begun = 0 if self.folder.earlier is None else self.folder.earlier.repeats
        missing = [run for repeat in range(done, begun) for run in self._missing_runs(repeat)]
        self.estimator.expect(_BEGUN_REPEATS, self._parts_of("run", missing))
        done = max(done, begun)
        runs = [self._scheduled_run(one, "repeat") for one in self._still_in()]
        most = max(self.config.repeats, self.config.max_repeats) - done if at_most is None else at_most
        least = min(max(self.config.repeats - done, at_least), most)
        self.estimator.expect(_REPEATS, self._parts_of("run", runs), least, most)

    def _missing_runs(self, repeat: int) -> list[ScheduledRun]:
        """Return the runs of a repeat that no earlier command has completed."""
        kept = set() if self.folder.earlier is None else self.folder.earlier.kept.keys()
        runs = [self._scheduled_run(one, f"repeat-{repeat + 1}") for one in self._still_in()]
        return [run for run in runs if str(run.folder.relative_to(self.folder.path)) not in kept]

    def _measure_kept(self, earlier: EarlierParts) -> None:
        """Tell the estimator the times of the runs that an earlier command has completed."""
        for folder, event in earlier.kept.items():
            if event.candidate not in self.failed_names:
                events: list[RunEvent] = read_events(self.folder.path / folder / EVENTS_FILE, RUN_EVENTS)
                seconds = max((one.time_s for one in events), default=0.0)
                self.estimator.measure(Part("run", event.candidate), RUN_S + seconds)

    def _expect_all(self) -> None:
        """Tell the estimator everything that the experiment will carry out."""
        if self._is_to_examine:
            self.estimator.expect("doctor", [launch_part(self._to_examine().shape), Part("examination")])
        if self._is_to_prove:
            runs = [self._scheduled_run(one, "proof") for one in self.to_prove()]
            self.estimator.expect("proof", self._parts_of("proof", [run for run in runs if not _has_proof(run)]))
        self.expect_repeats(0)

    def _parts_of(self, kind: PartKind, runs: Sequence[ScheduledRun]) -> list[Part]:
        """Return the launches and runs of some runs."""
        launches = [launch_part(self.target.shape_of(together[0])) for _, together in self.target.together(runs)]
        return [*launches, *[Part(kind, run.name) for run in runs]]

    def _write_estimate(self) -> None:
        remaining = self.estimator.remaining()
        if remaining is not None:
            self.events.write(remaining.to_event())

    @property
    def _is_to_examine(self) -> bool:
        """Whether the machine is to be examined, and has not been by an earlier command."""
        return self.config.doctor and not has_examination(self.folder.path)

    @property
    def _is_to_prove(self) -> bool:
        """Whether parity is to be proven, and no earlier command has found that it cannot be for any candidate."""
        earlier = [] if self.folder.earlier is None else self.folder.earlier.events
        return self.config.proof and all(event.candidates for event in events_of(earlier, UnprovenEvent))

    def _to_examine(self) -> CandidateConfig:
        """Return the candidate whose workload and ranks are examined: one on the most ranks."""
        largest = max(one.shape.ranks for one in self.candidate_configs)
        largest_ones = [one for one in self.candidate_configs if one.shape.ranks == largest]
        return next((one for one in largest_ones if one.candidate.role == "candidate"), largest_ones[0])

    def _examine(self) -> None:
        """Examine the machine and the link; if that fails, the experiment continues without it."""
        folder = self.folder.path / "doctor"
        self.folder.set_aside(folder)
        examined = self._to_examine()
        is_script = self.target.script_of(self._scheduled_run(examined, "doctor")) is not None
        try:
            with (
                self.display.examine(folder),
                self.estimator.launched(
                    "doctor", launch_part(examined.shape), [Part("examination")], lambda: _boundaries(folder, [folder])
                ),
            ):
                found = examine(
                    examined.config,
                    self.leader,
                    examined.shape,
                    folder,
                    with_workload=not is_script,
                    precision_file=self.folder.path / PRECISION_FILE,
                )
        except PacelineError as error:
            self.events.write(UnexaminedEvent(reason=error.message, hint=error.hint))
            self.display.unexamined(error.message)
            return
        finally:
            self.estimator.expect("doctor", [])
        self._guess_runs(examined, found)
        write_examination(self.folder.path, found)
        self.display.examined(findings(found))

    def _guess_runs(self, examined: CandidateConfig, found: Examination) -> None:
        """Guess the time of runs from the steps that the doctor trained, where there was no trial: on a GPU."""
        for one in self.candidate_configs:
            steps, part = one.config.steps, Part("run", one.candidate.name)
            if steps is not None and found.workload is not None and one.shape == examined.shape:
                self.estimator.guess(part, RUN_S + steps * found.workload.step_s)

    def _prove(self) -> None:
        """Prove the candidates that have no proof yet. An earlier proof that failed is repeated."""
        earlier = [] if self.folder.earlier is None else self.folder.earlier.events
        runs = [self._scheduled_run(one, "proof") for one in self.to_prove()]
        kept = [run for run in runs if _has_proof(run)]
        try:
            self.target.prove([run for run in runs if run not in kept], self)
        except Unproven as reason:
            self.events.write(UnprovenEvent(reason=str(reason)))
            self.display.unproven(str(reason))
            return
        finally:
            self.estimator.expect("proof", [])
        recorded = {event.candidate for event in events_of(earlier, ParityEvent)}
        recorded |= {name for event in events_of(earlier, UnprovenEvent) for name in event.candidates}
        unproven: dict[str, list[str]] = {}
        for run in runs:
            parity = read_parity(run.folder)
            if parity is None or (run in kept and run.name in recorded):
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
        begun = 0 if self.folder.earlier is None else self.folder.earlier.repeats
        for repeat in range(max(self.config.repeats, self.config.max_repeats)):
            self._repeat(repeat)
            enough = repeat + 1 >= begun and self.enough(repeat + 1)
            self._write_estimate()
            if enough:
                return

    def _repeat(self, repeat: int) -> None:
        """Train every candidate once, in rotated order, with the same seed; runs that are complete are kept.

        Runs of a repeat that was cut off are therefore measured in two parts. The analysis compares times only between
        runs of the same part.
        """
        earlier = self.folder.earlier
        kept = set() if earlier is None else earlier.kept.keys()
        scheduled = set() if earlier is None else {event.folder for event in events_of(earlier.events, ScheduledEvent)}
        runs = []
        for candidate_config in in_rotated_order(self._still_in(), repeat, self.place_of):
            seeded = replace(
                candidate_config, config=replace(candidate_config.config, seed=candidate_config.config.seed + repeat)
            )
            run = self._scheduled_run(seeded, f"repeat-{repeat + 1}")
            where = str(run.folder.relative_to(self.folder.path))
            if where in kept:
                continue
            if where not in scheduled:
                self.events.write(ScheduledEvent(candidate=run.name, repeat=repeat, folder=where))
            runs.append(run)
        self.expect_repeats(repeat + 1)
        self.estimator.expect("repeat", self._parts_of("run", runs))
        self.run_in_order("train", f"repeat {repeat + 1}", runs)
        self.estimator.expect("repeat", [])

    def run_in_order(self, task: Task, stage: str, runs: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Start ranks for all runs; a candidate that fails is left out from now on."""
        for folder, together in self.target.together(runs):
            self._run_together(task, stage, folder, together, oracle)

    def _run_together(self, task: Task, stage: str, folder: Path, runs: list[ScheduledRun], oracle: str) -> None:
        """Start ranks for runs that share a launch; after a failure, start new ranks for the runs that remain."""
        while runs:
            try:
                self.launch(task, stage, folder, runs, oracle)
                return
            except (DataError, LaunchError, RecordError):  # No candidate is the cause.
                raise
            except PacelineError as error:
                failed = _failed_index(error, runs)
                self._fail(runs[failed].candidate_config, stage, error)
                runs = runs[failed + 1 :]

    def launch(self, task: Task, stage: str, folder: Path, runs: Sequence[ScheduledRun], oracle: str = "") -> None:
        """Start ranks that carry out these runs one after the other; raise if one fails."""
        for run in runs:
            self.folder.set_aside(run.folder)
            run.folder.mkdir(parents=True, exist_ok=True)
        job_folder = RunFolder.create(_unused_job_folder(folder))
        config = runs[0].candidate_config.config
        job = Job(
            folder=job_folder,
            runs=tuple((run.candidate_config.config, RunFolder(run.folder)) for run in runs),
            task=task,
            script=self.target.script_of(runs[0]),
            oracle=oracle,
            timeout=config.timeout_s,
            hang_timeout=config.hang_timeout,
            iface=self.leader.launch.iface,
            threads=self.threads_of(runs[0]),
            precision_file=str(self.folder.path / PRECISION_FILE),
            command=command_line(),
        )
        shape = self.target.shape_of(runs[0])
        part: tuple[str, PartKind] = ("repeat", "run") if task == "train" else ("proof", "proof")
        timed = self.estimator.launched(
            part[0],
            launch_part(shape),
            [Part(part[1], run.name) for run in runs],
            lambda: _boundaries(job_folder.path, [run.folder for run in runs]),
        )
        try:
            with self.display.launch(stage, runs, config.steps), timed:
                self.leader.run(job, shape)
        finally:  # An experiment measures what checkpoints cost, and has no use for them.
            for run in runs:
                shutil.rmtree(run.folder / CHECKPOINTS_FOLDER, ignore_errors=True)

    def _fail(self, candidate_config: CandidateConfig, stage: str, error: PacelineError) -> None:
        name = candidate_config.candidate.name
        left_out = self.leaves_out(type(error).__name__)
        if left_out:
            self.failed_names.add(name)
            self.estimator.leave_out(name)
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
        self.display.failed(name, error, left_out=left_out)

    def _scheduled_run(self, candidate_config: CandidateConfig, stage: str) -> ScheduledRun:
        """Return a candidate's run in a stage; runs that share a launch have sibling folders."""
        folder = self.folder.path / stage
        if len({self.place_of(other) for other in self.candidate_configs}) > 1:
            folder /= self.place_of(candidate_config)
        return ScheduledRun(candidate_config.candidate.name, candidate_config, folder / self._slug(candidate_config))

    def _slug(self, candidate_config: CandidateConfig) -> str:
        """Return a folder name that is unique among the candidates."""
        number = 1 + [other.candidate.name for other in self.candidate_configs].index(candidate_config.candidate.name)
        return f"{number}-" + re.sub(r"[^A-Za-z0-9_=.+]+", "-", candidate_config.candidate.name).strip("-")

    def _still_in(self) -> list[CandidateConfig]:
        """Return the candidates that have not failed; raise the first error if none is left."""
        remaining = [one for one in self.candidate_configs if one.candidate.name not in self.failed_names]
        if not remaining:
            assert self.first_error is not None
            raise self.first_error
        return remaining


def _has_proof(run: ScheduledRun) -> bool:
    """Return whether parity was tested, and the result does not stop the experiment."""
    parity = read_parity(run.folder)
    return parity is not None and (parity.holds or not parity.lossless or bool(parity.unproven))


def _unused_job_folder(folder: Path) -> Path:
    """Return a folder for a job: the given one, or one inside if an earlier job has used it."""
    restarts = (folder / f"restart-{number}" for number in itertools.count(1))
    return next(path for path in itertools.chain([folder], restarts) if not (path / JOB_FILE).exists())


def _boundaries(job_folder: Path, run_folders: Sequence[Path]) -> list[float | None]:
    """Return when the ranks of a launch were ready, and when each run so far ended; the first is None if unknown."""
    files = [job_folder / READY_FILE, *[folder / FINISHED_FILE for folder in run_folders]]
    times = list(itertools.takewhile(lambda at: at is not None, map(_written_at, files[1:])))
    ready = _written_at(files[0])
    return [ready, *times] if times or ready is not None else []


def _written_at(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


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

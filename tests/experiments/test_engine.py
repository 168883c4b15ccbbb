"""A comparison examines the machine first, and goes on where that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examinations import examination, rank_info
from experiments_on_disk import write_run
from paceline.analysis.findings import Finding
from paceline.analysis.remaining_time import Part
from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.errors import LaunchError
from paceline.experiments import engine as engine
from paceline.experiments.candidates import make_candidates
from paceline.experiments.compare import CompareExperiment
from paceline.experiments.estimate import RUN_S
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.launch.leader import Leader
from paceline.records.events import EXPERIMENT_EVENTS, ScheduledEvent, UnexaminedEvent, UnprovenEvent, read_events
from paceline.records.examination import Examination, read_examination
from paceline.records.experiment.design import CompareDescription
from paceline.records.experiment.folder import ExperimentFolder
from run_models import PROVENANCE, compare_design


class Board:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def examine(self, folder: Path) -> Iterator[None]:
        self.told.append(f"examining in {folder.name}")
        yield

    def examined(self, found: Sequence[Finding]) -> None:
        self.told += [finding.message for finding in found if finding.level == "problem"]

    def continued(self, folder: Path, runs: int, planned: int, failed: Sequence[str], repeats: int) -> None:
        self.told.append(f"{folder.name}: {runs} of {planned} runs, {list(failed)}, {repeats} repeats")

    def unexamined(self, reason: str) -> None:
        self.told.append(f"unexamined: {reason}")


def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Examination | Exception) -> tuple[Any, Any]:
    """What the board was told, and what `examine` was asked, in an experiment that does nothing else."""
    asked: list[tuple[RunConfig, int, bool]] = []
    leader = Leader(LauncherProcess(), LaunchConfig(ranks=2), [], None, print)

    def examine(
        config: RunConfig, given: Leader, shape: Shape, folder: Path, *, with_workload: bool, precision_file: Path
    ) -> Examination:
        assert given is leader
        assert precision_file.parent == tmp_path / "e", "one choice for all runs of the experiment"
        assert folder == tmp_path / "e" / "doctor"
        asked.append((config, shape.ranks, with_workload))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(engine, "examine", examine)
    display = Board()
    experiment = an_experiment(tmp_path, CompareConfig(strategies="single,allreduce,ddp"), leader, display)
    experiment._examine()
    experiment.events.close()
    return display.told, asked


def an_experiment(
    tmp_path: Path, config: CompareConfig, leader: Leader | None = None, display: Board | None = None
) -> CompareExperiment:
    """Return a comparison in the folder `e` that has not started, or that goes on."""
    candidate_configs = make_candidates(RunConfig(steps=20), config, Shape(1, 2))
    description = CompareDescription(
        kind="compare",
        candidates=[candidate_config.candidate for candidate_config in candidate_configs],
        config={},
        design=compare_design(repeats=config.repeats, max_repeats=config.max_repeats),
        provenance=PROVENANCE,
    )
    folder = ExperimentFolder.create(tmp_path / "e", description)
    leader = leader or Leader(LauncherProcess(), LaunchConfig(ranks=2), [], None, print)
    return CompareExperiment(WorkloadTarget(), candidate_configs, leader, config, folder, display or Board())  # type: ignore[arg-type]


def test_what_was_found_is_kept_and_problems_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examination(*[rank_info(rank) for rank in range(4)], workload=None)
    told, asked = examined(tmp_path, monkeypatch, found)
    assert read_examination(tmp_path / "e") == found
    assert told[0] == "examining in doctor"
    assert [line.split(" share ")[0] for line in told[1:]] == ["4 ranks with 1 thread each"]
    ((config, ranks, with_workload),) = asked
    assert (config.strategy, ranks, with_workload) == ("allreduce", 2, True), "one that all ranks take part in"


def test_an_examination_that_fails_is_said_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = examined(tmp_path, monkeypatch, LaunchError("the ranks could not be started.", hint="wait"))
    assert told == ["examining in doctor", "unexamined: the ranks could not be started."]
    assert not (tmp_path / "e" / "doctor.json").exists()
    (event,) = read_events(tmp_path / "e" / "events.jsonl", EXPERIMENT_EVENTS)
    assert (type(event), event.reason) == (UnexaminedEvent, "the ranks could not be started.")


def test_folders_of_runs_keep_the_sign_of_an_exponent(tmp_path: Path) -> None:
    experiment = an_experiment(tmp_path, CompareConfig(strategies="ddp", vary=("lr=1e30,1e-30",)))
    experiment.events.close()
    names = {experiment._scheduled_run(one, "repeat-1").folder.name for one in experiment.candidate_configs}
    assert {name.partition("lr=")[2] for name in names} == {"1e+30", "1e-30"}


def expected_runs(experiment: CompareExperiment) -> dict[str, tuple[int, int]]:
    """Return the least and the largest number of runs that the estimate expects, by candidate."""
    stages = experiment.estimator._expected.values()
    counts = [(part.name, times) for parts in stages for part, times in parts.items() if part.kind == "run"]
    return {name: tuple(map(sum, zip(*[t for own, t in counts if own == name], strict=True))) for name, _ in counts}  # type: ignore[misc]


def test_the_estimate_of_an_experiment_that_goes_on_leaves_out_what_is_there(tmp_path: Path) -> None:
    config = CompareConfig(strategies="allreduce,ddp", repeats=3, max_repeats=5)
    first = an_experiment(tmp_path, config)
    for repeat, number in ((0, 0), (0, 1), (1, 0)):
        one = first.candidate_configs[number]
        run = first._scheduled_run(one, f"repeat-{repeat + 1}")
        where = str(run.folder.relative_to(first.folder.path))
        first.events.write(ScheduledEvent(candidate=run.name, repeat=repeat, folder=where))
        write_run(run.folder, one.candidate, one.config, 2, [2.0] * 20, 0.01, None, PROVENANCE)
    first.events.write(UnprovenEvent(reason="the workload has no fixed batch."))
    first.events.close()
    first.folder.close()

    experiment = an_experiment(tmp_path, config)
    assert experiment.folder.earlier is not None
    experiment._continue(experiment.folder.earlier)
    experiment._expect_all()
    assert expected_runs(experiment) == {"allreduce": (1, 3), "ddp": (2, 4)}
    measured = experiment.estimator._measured
    assert {part: len(times) for part, times in measured.items()} == {
        Part("run", "allreduce"): 2,
        Part("run", "ddp"): 1,
    }
    assert all(seconds >= RUN_S for times in measured.values() for seconds in times)
    assert "proof" not in experiment.estimator._expected, "an earlier command found that there is none"
    experiment.expect_repeats(1)
    assert expected_runs(experiment) == {"allreduce": (1, 3), "ddp": (2, 4)}
    experiment.expect_repeats(2)
    assert expected_runs(experiment) == {"allreduce": (1, 3), "ddp": (1, 3)}
    experiment.events.close()
    experiment.folder.close()

"""Measure points, interleaved: candidates on several shapes of ranks; those of one shape share a launch.

A `PointGrid` says what varies at each shape. `measure_points` does all the rest.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from paceline.analysis.remaining_time import TimeEstimator
from paceline.config import LaunchConfig, PointsConfig, RunConfig
from paceline.experiments.checks import check_length, gpus_to_use, settings_of
from paceline.experiments.engine import ProgressDisplay
from paceline.experiments.estimate import Trials, guess_times, load_slowdowns
from paceline.experiments.names import prepare_data
from paceline.experiments.scaling.experiment import (
    PointsExperiment,
    check_gpus,
    point_threads,
    points_design,
    target_name,
)
from paceline.experiments.scaling.machines import choose_threads, detect_machines, machine_cores
from paceline.experiments.scaling.points import Points, shared_settings
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.channel.own_command import EXAMINING, PROVING, TRAINING, OwnCommand
from paceline.launch.launcher_process import LauncherProcess, Notify, Shape
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.records import provenance
from paceline.records.experiment.design import DESCRIPTIONS, PointsDesign
from paceline.records.experiment.folder import ExperimentFolder

DEFAULT_STEPS = 20
PointsConfigT = TypeVar("PointsConfigT", bound=PointsConfig)


@dataclass(frozen=True)
class PointGrid(ABC, Generic[PointsConfigT]):
    """Points that an experiment measures; a command has a subclass. `base` has a length."""

    kind: ClassVar[str]
    """Kind of the experiment, which is the name of the command too."""

    base: RunConfig
    config: PointsConfigT

    @abstractmethod
    def choose_shapes(self, launcher: LauncherProcess, on_one_host: int) -> list[Shape]:
        """Return the shapes of ranks to measure; `on_one_host` is the most ranks per host by default."""

    @abstractmethod
    def make_points(self, shapes: list[Shape]) -> Points:
        """Return the points on these shapes, checked as far as possible without the data."""

    @abstractmethod
    def run_trials(self, points: Points) -> tuple[Points, Trials]:
        """Train a few samples; return the points that the data is large enough for, and the trials."""

    @abstractmethod
    def design(self, points: Points, trials: Trials, shared: dict[str, Any]) -> PointsDesign:
        """Return the design; `shared` has the values that every grid has."""


def measure_points(
    make_grid: Callable[[RunConfig], PointGrid[Any]],
    base: RunConfig,
    launch: LaunchConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run an experiment over points. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    launcher = find_launcher_process(launch, os.environ)
    if not base.has_length:
        base = replace(base, steps=DEFAULT_STEPS)
    check_length([base.steps], DEFAULT_STEPS)
    grid = make_grid(base)
    config, gpus = grid.config, gpus_to_use(base)
    shapes = grid.choose_shapes(launcher, on_one_host=gpus or max(2, int(machine_cores())))
    check_gpus(base, shapes, gpus, launcher)
    points = grid.make_points(shapes)
    prepare_data(base)
    settings = settings_of(grid.kind, launch, base) | dataclasses.asdict(config)  # Its `ranks` is a list.
    command = OwnCommand(
        configs=(base, *[one.config for one in points.candidate_configs]), tasks=(*TRAINING, *PROVING, *EXAMINING)
    )
    leader = join_launch(launcher, launch, settings, command, timeout_s=base.timeout_s, notify=notify)
    if leader is None:
        return
    with leader:
        place = detect_machines(leader.launcher_infos)
        points, trials = grid.run_trials(points)
        candidate_configs = points.candidate_configs
        threads = choose_threads(points.shapes, launch, place, gpus)
        threads_of = partial(point_threads, threads)
        guesses = guess_times(candidate_configs, trials, place, threads_of)
        estimator = TimeEstimator(guesses, load_slowdowns(candidate_configs, trials, threads_of))
        shared = points_design(config, points, threads, launch) | dataclasses.asdict(place)
        design = grid.design(points, trials, shared | {"gpus": gpus, "target": target_name(base)})
        candidates = [one.candidate for one in candidate_configs]
        description = DESCRIPTIONS[grid.kind](
            kind=grid.kind,
            candidates=candidates,
            config=shared_settings(dataclasses.asdict(candidate_configs[0].config)),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, grid.kind), description)
        on_folder(folder.path)
        display.plan(design, [candidate.name for candidate in candidates], candidate_configs[0].config)
        PointsExperiment(
            WorkloadTarget(), candidate_configs, leader, config, folder, display, threads=threads, estimator=estimator
        ).run()

"""`paceline scale`: measure strategies at several world sizes, strong and weak, interleaved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.analysis.remaining_time import TimeEstimator
from paceline.config import LaunchConfig, RunConfig, ScaleConfig
from paceline.config.setting import metadata_of
from paceline.experiments.checks import check_length, gpus_to_use, settings_of
from paceline.experiments.engine import ProgressDisplay
from paceline.experiments.estimate import guess_times, load_slowdown, run_trials
from paceline.experiments.names import prepare_data
from paceline.experiments.scaling.experiment import (
    PointsExperiment,
    check_gpus,
    point_threads,
    points_design,
    target_name,
)
from paceline.experiments.scaling.machines import (
    choose_threads,
    detect_machines,
    machine_cores,
)
from paceline.experiments.scaling.points import ScaleBatches, make_points, shared_settings
from paceline.experiments.scaling.shapes import choose_shapes
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.launcher_process import Notify
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.records import provenance
from paceline.records.experiment import (
    ExperimentFolder,
    ScaleDescription,
    ScaleDesign,
)
from paceline.records.schema import SCALE_KIND

DEFAULT_STEPS = 20


def scale(
    base: RunConfig,
    launch: LaunchConfig,
    config: ScaleConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run a scaling experiment. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    launcher = find_launcher_process(launch, os.environ)
    if not base.has_length:
        base = replace(base, steps=DEFAULT_STEPS)
    check_length([base.steps], DEFAULT_STEPS)
    gpus = gpus_to_use(base)
    shapes = choose_shapes(config, launcher, on_one_host=gpus or max(2, int(machine_cores())))
    check_gpus(base, shapes, gpus, launcher)
    candidate_configs = make_points(replace(base, evaluate=False, batch_per_rank=None), config, shapes)
    prepare_data(base)
    settings = settings_of("scale", launch, base) | dataclasses.asdict(config)  # Its `ranks` is a list.
    leader = join_launch(launcher, launch, settings, timeout_s=base.timeout, notify=notify)
    if leader is None:
        return
    with leader:
        place = detect_machines(leader.launcher_infos)
        threads = choose_threads(shapes, launch, place, gpus)
        estimator = TimeEstimator(
            guess_times(candidate_configs, run_trials(candidate_configs), place, partial(point_threads, threads)),
            slowdown=load_slowdown(),
        )
        batches = ScaleBatches.of(config, max(shape.ranks for shape in shapes))
        design = ScaleDesign(
            **points_design(config, candidate_configs, shapes, threads, launch),
            modes=list(config.modes),
            batch=batches.whole,
            batch_per_rank=batches.share,
            **dataclasses.asdict(place),
            gpus=gpus,
            target=target_name(base),
        )
        candidates = [candidate_config.candidate for candidate_config in candidate_configs]
        description = ScaleDescription(
            kind=SCALE_KIND,
            candidates=candidates,
            config=shared_settings(dataclasses.asdict(candidate_configs[0].config), metadata_of(ScaleConfig)),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, SCALE_KIND), description)
        on_folder(folder.path)
        display.plan(design, [candidate.name for candidate in candidates], candidate_configs[0].config)
        PointsExperiment(
            WorkloadTarget(), candidate_configs, leader, config, folder, display, threads=threads, estimator=estimator
        ).run()

"""`paceline batch`: measure batch sizes on several world sizes, interleaved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.analysis.remaining_time import TimeEstimator
from paceline.config import BatchConfig, LaunchConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.batch_sizes.core_speed import measure_core_speed
from paceline.experiments.batch_sizes.points import choose_batch_shapes, make_batch_points, without_too_large
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
from paceline.experiments.scaling.machines import choose_threads, detect_machines, machine_cores
from paceline.experiments.scaling.points import shared_settings
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.launcher_process import Notify
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.records import provenance
from paceline.records.experiment import BatchDescription, BatchDesign, ExperimentFolder
from paceline.records.schema import BATCH_KIND
from paceline.workloads.recipes import choose_recipe

DEFAULT_STEPS = 20


def batch(
    base: RunConfig,
    launch: LaunchConfig,
    config: BatchConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run an experiment over batch sizes. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    launcher = find_launcher_process(launch, os.environ)
    if not base.has_length:
        base = replace(base, steps=DEFAULT_STEPS)
    check_length([base.steps], DEFAULT_STEPS)
    trains = base.steps is None
    _check_tests(base, trains=trains)
    gpus = gpus_to_use(base)
    shapes = choose_batch_shapes(config, launcher, on_one_host=gpus or max(2, int(machine_cores())))
    check_gpus(base, shapes, gpus, launcher)
    base = replace(base, evaluate=base.evaluate and trains, batch_per_rank=None)
    points = make_batch_points(base, config, shapes)
    prepare_data(base)
    settings = settings_of("batch", launch, base) | dataclasses.asdict(config)  # Its `ranks` is a list.
    leader = join_launch(launcher, launch, settings, timeout_s=base.timeout, notify=notify)
    if leader is None:
        return
    with leader:
        place = detect_machines(leader.launcher_infos)
        trials = run_trials(points.candidate_configs, check_batches=False)
        if trials:
            points = without_too_large(points, next(iter(trials.values())).train_samples)
        candidate_configs = points.candidate_configs
        threads = choose_threads(points.shapes, launch, place, gpus)
        estimator = TimeEstimator(
            guess_times(candidate_configs, trials, place, partial(point_threads, threads)), slowdown=load_slowdown()
        )
        trained_in = next((trial.precision for trial in trials.values()), None)  # Of a user's recipe, too.
        core = None if gpus else measure_core_speed(trained_in or choose_recipe(base).precision)
        design = BatchDesign(
            **points_design(config, candidate_configs, points.shapes, threads, launch),
            **dataclasses.asdict(place),
            sizes=list(config.batch_sizes),
            per_rank=config.per_rank,
            trains=trains,
            core_flop_per_s=None if core is None else core.flop_per_s,
            core_other_load=None if core is None else core.other_load,
            left_out=points.left_out,
            batch=None,
            gpus=gpus,
            target=target_name(base),
        )
        candidates = [candidate_config.candidate for candidate_config in candidate_configs]
        description = BatchDescription(
            kind=BATCH_KIND,
            candidates=candidates,
            config=shared_settings(dataclasses.asdict(candidate_configs[0].config), ("batch", "batch_per_rank")),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, BATCH_KIND), description)
        on_folder(folder.path)
        display.plan(design, [candidate.name for candidate in candidates], candidate_configs[0].config)
        PointsExperiment(
            WorkloadTarget(), candidate_configs, leader, config, folder, display, threads=threads, estimator=estimator
        ).run()


def _check_tests(base: RunConfig, *, trains: bool) -> None:
    """Raise for settings of tests if the runs have a number of steps, since only trained runs are tested."""
    given = {"--eval-every": base.eval_every, "--eval-ranks": base.eval_ranks}
    option = next((name for name, value in given.items() if value), None)
    if option is not None and not trains:
        raise UsageError(
            f"{option} needs runs that are trained and tested.", hint="use --epochs or --seconds instead of --steps"
        )

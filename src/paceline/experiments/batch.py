"""`paceline batch`: measure batch sizes on several world sizes, interleaved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.config import BatchConfig, LaunchConfig, RunConfig
from paceline.config.emulation import emulation_info
from paceline.experiments.batch_sizes.core_speed import measure_core_flop_per_s
from paceline.experiments.batch_sizes.points import choose_batch_shapes, make_batch_points, without_too_large
from paceline.experiments.checks import check_length, gpus_to_use, settings_of
from paceline.experiments.engine import ProgressDisplay
from paceline.experiments.estimate import run_trial
from paceline.experiments.names import prepare_data
from paceline.experiments.scaling.estimate import estimate_from_trial
from paceline.experiments.scaling.experiment import PointsExperiment, check_gpus, points_design, target_name
from paceline.experiments.scaling.machines import (
    DetectedMachines,
    are_bound,
    choose_threads,
    find_machines,
    machine_cores,
    own_quota,
)
from paceline.experiments.scaling.points import shared_settings
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.launcher_process import Notify
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.measure.cores import usable_cores
from paceline.records import provenance
from paceline.records.experiment import BatchDescription, BatchDesign, ExperimentFolder
from paceline.records.schema import BATCH_KIND

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
    gpus = gpus_to_use(base)
    cores = machine_cores()
    shapes = choose_batch_shapes(config, launcher, on_one_host=gpus or max(2, int(cores)))
    check_gpus(base, shapes, gpus, launcher)
    base = replace(base, evaluate=base.evaluate and trains, batch_per_rank=None)
    points = make_batch_points(base, config, shapes)
    prepare_data(base)
    settings = settings_of("batch", launch, base) | dataclasses.asdict(config)  # Its `ranks` is a list.
    leader = join_launch(launcher, launch, settings, timeout_s=base.timeout, notify=notify)
    if leader is None:
        return
    with leader:
        emulation = emulation_info(os.environ)
        place = DetectedMachines(
            emulated=None if emulation is None else emulation.spec,
            host_cpus=None if emulation is None else emulation.host_cpus,
            machine_cores=cores,
            machines=find_machines(leader.launcher_infos, emulated=emulation is not None, quota=own_quota()),
            ranks_pinned=are_bound(leader.launcher_infos),
        )
        estimate_s = None
        if not gpus:  # This process must not occupy a GPU before ranks start.
            trial = run_trial(points.candidate_configs[0].config)
            points = without_too_large(points, trial.train_samples)
            core_s = trial.sample_s * max(1, int(usable_cores()))
            estimate_s = estimate_from_trial(points.candidate_configs, config, place, trial, core_s)
        candidate_configs = points.candidate_configs
        threads = choose_threads(points.shapes, launch, place, gpus)
        design = BatchDesign(
            **points_design(config, candidate_configs, points.shapes, threads, launch),
            **dataclasses.asdict(place),
            sizes=list(config.batch_sizes),
            per_rank=config.per_rank,
            trains=trains,
            core_flop_per_s=None if gpus else measure_core_flop_per_s(base.precision),
            left_out=points.left_out,
            batch=None,
            gpus=gpus,
            estimate_s=estimate_s,
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
        PointsExperiment(WorkloadTarget(), candidate_configs, leader, config, folder, display, threads=threads).run()

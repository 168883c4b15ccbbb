"""`paceline scale`: measure strategies at several world sizes, strong and weak, interleaved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.analysis.record_set import collect_records
from paceline.analysis.remaining_time import TimeEstimator
from paceline.analysis.scaling.curves import scaling
from paceline.config import LaunchConfig, RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.checks import check_length, gpus_to_use, settings_of
from paceline.experiments.engine import Experiment, ProgressDisplay
from paceline.experiments.estimate import guess_times, load_slowdown, run_trials
from paceline.experiments.names import prepare_data
from paceline.experiments.scaling.machines import (
    ThreadCounts,
    choose_threads,
    detect_machines,
    machine_cores,
)
from paceline.experiments.scaling.points import ScaleBatches, make_points, shared_settings
from paceline.experiments.scaling.shapes import choose_shapes
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import ScheduledRun, WorkloadTarget
from paceline.launch.launcher_process import LauncherProcess, Notify, Shape
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.measure.cores import threads_per_rank
from paceline.records import provenance
from paceline.records.experiment import (
    ExperimentFolder,
    ScaleDescription,
    ScaleDesign,
    ScaleShape,
    read_experiment,
)
from paceline.records.schema import SCALE_KIND
from paceline.workloads.names import is_user_workload

DEFAULT_STEPS = 20


@dataclass
class ScaleExperiment(Experiment):
    """A scaling experiment in progress: ends after its repeats."""

    threads: ThreadCounts = field(default_factory=lambda: ThreadCounts(None, None))

    def to_prove(self) -> list[CandidateConfig]:
        """Return every strategy once, at its largest world size and most hosts."""
        largest: dict[str, CandidateConfig] = {}
        for candidate_config in sorted(super().to_prove(), key=lambda one: (one.shape.ranks, one.shape.hosts)):
            if candidate_config.candidate.role != "baseline":
                largest[candidate_config.candidate.strategy] = candidate_config
        return list(largest.values())

    def threads_of(self, run: ScheduledRun) -> int | None:
        return self.threads.single if run.candidate_config.candidate.role == "baseline" else self.threads.rank

    def place_of(self, candidate_config: CandidateConfig) -> str:
        """Return the folder name of the launch; a baseline with another number of threads has its own launch."""
        apart = candidate_config.candidate.role == "baseline" and self.threads.single != self.threads.rank
        return super().place_of(candidate_config) + ("-single" if apart else "")

    def enough(self, repeats: int) -> bool:
        found = scaling(collect_records([read_experiment(self.folder.path)]))
        if self.first_error is not None and all(row.step_s is None for row in found.comparison.rows):
            raise self.first_error
        self.expect_repeats(repeats)
        self.display.refresh(found.comparison, repeats)
        return repeats >= self.config.repeats


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
    _check_gpus(base, shapes, gpus, launcher)
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
            guess_times(candidate_configs, run_trials(candidate_configs), place, partial(_threads_of, threads)),
            slowdown=load_slowdown(),
        )
        design = ScaleDesign(
            **_design(config, candidate_configs, shapes, threads, launch),
            **dataclasses.asdict(place),
            gpus=gpus,
            target=_target(base),
        )
        candidates = [candidate_config.candidate for candidate_config in candidate_configs]
        description = ScaleDescription(
            kind=SCALE_KIND,
            candidates=candidates,
            config=shared_settings(dataclasses.asdict(candidate_configs[0].config)),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, SCALE_KIND), description)
        on_folder(folder.path)
        display.plan(design, [candidate.name for candidate in candidates], candidate_configs[0].config)
        ScaleExperiment(
            WorkloadTarget(), candidate_configs, leader, config, folder, display, threads=threads, estimator=estimator
        ).run()


def _threads_of(threads: ThreadCounts, one: CandidateConfig) -> int:
    """Return the compute threads of each rank of a candidate."""
    given = threads.single if one.candidate.role == "baseline" else threads.rank
    return given or threads_per_rank(one.shape.ranks_per_host)


def _check_gpus(base: RunConfig, shapes: Sequence[Shape], gpus: int, launcher: LauncherProcess) -> None:
    most = max(shape.ranks_per_host for shape in shapes)
    if base.backend == "nccl" and most > gpus and launcher.ranks is None:
        raise UsageError(
            f"nccl needs one GPU per rank, but this host has {gpus} for {most} ranks.",
            hint=f"use --ranks up to {gpus} or --backend gloo" if gpus else "use --backend gloo",
        )


def _target(base: RunConfig) -> str:
    return base.workload if is_user_workload(base.workload) else f"{base.workload} on {base.data}"


def _design(
    config: ScaleConfig,
    candidate_configs: Sequence[CandidateConfig],
    shapes: Sequence[Shape],
    threads: ThreadCounts,
    launch: LaunchConfig,
) -> dict[str, Any]:
    """Return the part of the design that follows from the configuration."""
    largest = max(shapes, key=lambda shape: (shape.ranks, shape.hosts))
    batches = ScaleBatches.of(config, largest.ranks)
    return {
        "ranks": largest.ranks,
        "hosts": largest.hosts,
        "shapes": [ScaleShape(hosts=shape.hosts, ranks_per_host=shape.ranks_per_host) for shape in shapes],
        "modes": list(config.modes),
        "batch": batches.whole,
        "batch_per_rank": batches.share,
        "strategies": list(
            dict.fromkeys(candidate_config.candidate.strategy for candidate_config in candidate_configs)
        ),
        "threads": threads.rank or threads_per_rank(largest.ranks_per_host),
        "requested_threads": launch.threads,
        "requested_ranks_per_host": list(config.per_host),
        "repeats": config.repeats,
        "max_repeats": config.repeats,
        "interim_analyses": 1,
        "reference": next(one.candidate.name for one in candidate_configs if one.candidate.role == "baseline"),
        "proof": config.proof,
    }

"""Experiments whose candidates all run on ranks of one shape: launch, design, folder and measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.analysis.remaining_time import TimeEstimator
from paceline.config import LaunchConfig, RunConfig
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.checks import gpus_to_use, settings_of
from paceline.experiments.engine import Experiment, MeasurementConfig, ProgressDisplay
from paceline.experiments.estimate import guess_times, load_slowdowns
from paceline.experiments.scaling.machines import DetectedMachines, detect_machines
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import TargetInfo, TrainingTarget
from paceline.launch.channel.own_command import TRAINING, OwnCommand
from paceline.launch.job import Task
from paceline.launch.launcher_process import LauncherProcess, Notify, Shape
from paceline.launch.leader import join_launch
from paceline.measure.cores import threads_per_rank
from paceline.records import provenance
from paceline.records.experiment.design import DESCRIPTIONS, CompareDesign
from paceline.records.experiment.folder import ExperimentFolder
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create


@dataclass(frozen=True, kw_only=True)
class OneShapePlan:
    """An experiment, planned and checked, before the hosts of a launch meet."""

    kind: str
    """Name of the command."""
    base: RunConfig
    launch: LaunchConfig
    config: MeasurementConfig
    shape: Shape
    target: TrainingTarget
    candidate_configs: Sequence[CandidateConfig]
    reference: str
    """Name of the candidate that the others are compared with."""
    tried: Sequence[CandidateConfig]
    """Candidates to try before ranks start; for the others, the trial of the first one of these counts."""
    experiment: type[Experiment]
    design: type[CompareDesign]
    own_design: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the design that only this kind of experiment has, or sets."""
    tasks: tuple[Task, ...] = TRAINING
    """Tasks that ranks may be given."""
    script_args: Sequence[str] = ()
    notes: Sequence[str] = ()
    """Sentences to show before the measurement."""


def measure_on_one_shape(
    plan: OneShapePlan,
    launcher: LauncherProcess,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Join the launch; on the leader, measure. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    base, launch, shape, target = plan.base, plan.launch, plan.shape, plan.target
    candidate_configs = list(plan.candidate_configs)
    known = target.describe(plan.tried, shape.ranks) if launcher.is_leader else None
    settings = settings_of(plan.kind, launch, base, plan.config) | {"script_args": list(plan.script_args)}
    own_configs = (base, *[one.config for one in candidate_configs])
    command = OwnCommand(configs=own_configs, tasks=plan.tasks, script=target.script)
    leader = join_launch(launcher, launch, settings, command, timeout_s=base.timeout_s, notify=notify)
    if leader is None:
        return
    assert known is not None, "the leader describes the target"
    for sentence in plan.notes:
        notify(sentence)
    place = detect_machines(leader.launcher_infos)
    design = _design(plan, place, known)
    with leader:
        candidates = [one.candidate for one in candidate_configs]
        description = DESCRIPTIONS[plan.kind](
            kind=plan.kind,
            candidates=candidates,
            config=target.settings(candidate_configs),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, plan.kind), description)
        on_folder(folder.path)
        display.plan(design, [candidate.name for candidate in candidates], candidate_configs[0].config)
        estimator = _estimator(plan, place, known)
        plan.experiment(target, candidate_configs, leader, plan.config, folder, display, estimator=estimator).run()


def _design(plan: OneShapePlan, place: DetectedMachines, known: TargetInfo) -> CompareDesign:
    shape, launch, config = plan.shape, plan.launch, plan.config
    shared: dict[str, Any] = {
        "ranks": shape.ranks,
        "hosts": shape.hosts,
        "ranks_per_host": shape.ranks_per_host,
        **dataclasses.asdict(place),
        "gpus": gpus_to_use(plan.base),
        "threads": launch.threads or threads_per_rank(shape.ranks_per_host),
        "requested_threads": launch.threads,
        "repeats": config.repeats,
        "max_repeats": config.max_repeats,
        "interim_analyses": 1,
        "reference": plan.reference,
        "proof": config.proof,
        "target": known.target,
        "batch": known.batch,
    }
    return plan.design(**{**shared, **plan.own_design})


def _estimator(plan: OneShapePlan, place: DetectedMachines, known: TargetInfo) -> TimeEstimator:
    first = known.trials.get(plan.tried[0].candidate.name)
    names = [one.candidate.name for one in plan.candidate_configs]
    trials = {name: trial for name in names if (trial := known.trials.get(name, first)) is not None}
    threads_of = partial(_threads_of, plan.launch)
    guesses = guess_times(plan.candidate_configs, trials, place, threads_of)
    return TimeEstimator(guesses, load_slowdowns(plan.candidate_configs, trials, threads_of))


def _threads_of(launch: LaunchConfig, one: CandidateConfig) -> int:
    """Return the compute threads of each rank of a candidate, as ranks choose them."""
    roles = create(one.config.strategy).roles(one.shape.ranks)[: one.shape.ranks_per_host]
    return launch.threads or threads_per_rank(max(1, sum(role is not Role.IDLE for role in roles)))

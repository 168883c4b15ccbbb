"""`paceline race`: train one candidate several times until each run reaches a test accuracy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.record_set import collect_records
from paceline.config import LaunchConfig, RaceConfig, RunConfig
from paceline.config.race import DEFAULT_EPOCHS
from paceline.errors import DivergenceError
from paceline.experiments.candidates import WORKLOAD_RULES, CandidateConfig, role_of
from paceline.experiments.checks import choose_shape
from paceline.experiments.engine import Experiment, ProgressDisplay
from paceline.experiments.one_shape import OneShapePlan, measure_on_one_shape
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.launcher_process import Notify, Shape
from paceline.launch.rank_assignment import find_launcher_process
from paceline.records.experiment.design import Candidate, RaceDesign
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import RACE_KIND
from paceline.strategies.registry import create


@dataclass
class RaceExperiment(Experiment):
    """A race in progress. Each run has its own launch, so that its total time includes the start of its ranks."""

    def enough(self, repeats: int) -> bool:
        comparison = compare_records(collect_records([read_experiment(self.folder.path)]))
        self.expect_repeats(repeats)
        self.display.refresh(comparison, repeats)
        return repeats >= self.config.repeats

    def leaves_out(self, error_kind: str) -> bool:
        """Return whether an error ends the race: a run that diverges has missed its target, and the others go on."""
        return error_kind != DivergenceError.__name__


def race(
    base: RunConfig,
    launch: LaunchConfig,
    config: RaceConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run a race. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    base = run_config(base, config)
    launcher = find_launcher_process(launch, os.environ)
    shape = choose_shape(base, launch, launcher)
    one = make_candidate(base, shape)
    target = WorkloadTarget()
    target.prepare([one])
    plan = OneShapePlan(
        kind=RACE_KIND,
        base=base,
        launch=launch,
        config=config,
        shape=shape,
        target=target,
        candidate_configs=[one],
        reference=one.candidate.name,
        tried=[one],
        experiment=RaceExperiment,
        design=RaceDesign,
        own_design={
            "target_accuracy": config.target_accuracy,
            "eval_every": config.eval_every,
            "tta": base.tta,
            "seed": base.seed,
        },
    )
    measure_on_one_shape(plan, launcher, out, display, on_folder, notify)


def run_config(base: RunConfig, config: RaceConfig) -> RunConfig:
    """Return the config of the first run of a race: it ends at the target, or at its length."""
    base = replace(base, target=config.target_accuracy, eval_every=config.eval_every)
    return base if base.has_length else replace(base, epochs=DEFAULT_EPOCHS)


def make_candidate(config: RunConfig, shape: Shape) -> CandidateConfig:
    """Return the only candidate of a race, checked, with its global batch."""
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    if config.batch_per_rank is not None:
        config = replace(config, batch=config.batch_per_rank * shape.ranks, batch_per_rank=None)
    WORKLOAD_RULES.check_names(config)
    WORKLOAD_RULES.check_fit(config, strategy, shape.ranks)
    candidate = Candidate(config.strategy, config.strategy, {}, role_of(strategy, shape.ranks), strategy.lossless)
    return CandidateConfig(candidate, config, shape)

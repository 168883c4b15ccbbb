"""`paceline compare`: measure candidates on ranks of one shape until it is clear which is the fastest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.record_set import collect_records, reference_of
from paceline.config import LENGTH_SETTINGS, CompareConfig, LaunchConfig, RunConfig
from paceline.experiments.candidates import make_candidates, strategies_of, varied_keys
from paceline.experiments.checks import check_length, choose_shape, gpus_to_use, left_out_of_sets
from paceline.experiments.engine import Experiment, ProgressDisplay
from paceline.experiments.one_shape import OneShapePlan, measure_on_one_shape
from paceline.experiments.training_targets import choose_target
from paceline.launch.channel.own_command import EXAMINING, PROVING, TRAINING
from paceline.launch.launcher_process import Notify
from paceline.launch.rank_assignment import find_launcher_process
from paceline.records.experiment.design import CompareDesign
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import COMPARE_KIND

DEFAULT_STEPS = 40


@dataclass
class CompareExperiment(Experiment):
    """A comparison in progress: ends when the two fastest clearly differ or are equal, or after the most repeats."""

    def enough(self, repeats: int) -> bool:
        comparison = compare_records(collect_records([read_experiment(self.folder.path)]))
        if self.first_error is not None and all(row.step_s is None for row in comparison.rows):
            raise self.first_error
        enough = repeats >= self.config.repeats and comparison.is_clear
        self.expect_repeats(repeats, at_least=0 if enough else 1, at_most=0 if enough else None)
        self.display.refresh(comparison, repeats)
        return enough


def compare(
    base: RunConfig,
    launch: LaunchConfig,
    config: CompareConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
    script_args: Sequence[str] = (),
) -> None:
    """Run a comparison. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    config = config.with_consistent_repeats()
    launcher = find_launcher_process(launch, os.environ)
    target, base = choose_target(base, config, script_args)
    if not base.has_length and not varied_keys(config) & set(LENGTH_SETTINGS):
        base = replace(base, steps=DEFAULT_STEPS)
    shape = choose_shape(base, launch, launcher)
    candidate_configs = make_candidates(base, config, shape, target.rules)
    check_length((candidate_config.config.steps for candidate_config in candidate_configs), DEFAULT_STEPS)
    target.prepare(candidate_configs)
    plan = OneShapePlan(
        kind=COMPARE_KIND,
        base=base,
        launch=launch,
        config=config,
        shape=shape,
        target=target,
        candidate_configs=candidate_configs,
        reference=reference_of([one.candidate for one in candidate_configs]).name,
        tried=candidate_configs,
        experiment=CompareExperiment,
        design=CompareDesign,
        own_design={"interim_analyses": config.interim_analyses},
        tasks=(*TRAINING, *PROVING, *EXAMINING),
        script_args=script_args,
        notes=left_out_of_sets(strategies_of(config), gpus_to_use(base)),
    )
    measure_on_one_shape(plan, launcher, out, display, on_folder, notify)

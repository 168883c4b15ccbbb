"""`paceline compare`: measure candidates on ranks of one shape until it is clear which is the fastest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.record_set import collect_records, reference_of
from paceline.analysis.remaining_time import TimeEstimator
from paceline.config import LENGTH_SETTINGS, CompareConfig, LaunchConfig, RunConfig
from paceline.experiments.candidates import CandidateConfig, make_candidates, strategies_of, varied_keys
from paceline.experiments.checks import check_length, choose_shape, gpus_to_use, left_out_of_sets, settings_of
from paceline.experiments.engine import Experiment, ProgressDisplay
from paceline.experiments.estimate import guess_times, load_slowdowns
from paceline.experiments.scaling.machines import detect_machines
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import choose_target
from paceline.launch.channel.own_command import EXAMINING, PROVING, TRAINING, OwnCommand
from paceline.launch.launcher_process import Notify
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.measure.cores import threads_per_rank
from paceline.records import provenance
from paceline.records.experiment.design import CompareDescription, CompareDesign
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import COMPARE_KIND
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create

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
    candidates = [candidate_config.candidate for candidate_config in candidate_configs]
    target.prepare(candidate_configs)
    known = target.describe(candidate_configs, shape.ranks) if launcher.is_leader else None
    settings = settings_of("compare", launch, base, config) | {"script_args": list(script_args)}
    command = OwnCommand(
        configs=(base, *[one.config for one in candidate_configs]),
        tasks=(*TRAINING, *PROVING, *EXAMINING),
        script=target.script,
    )
    leader = join_launch(launcher, launch, settings, command, timeout_s=base.timeout_s, notify=notify)
    if leader is None:
        return
    assert known is not None, "the leader describes the target"
    for sentence in left_out_of_sets(strategies_of(config), gpus_to_use(base)):
        notify(sentence)
    place = detect_machines(leader.launcher_infos)
    threads_of = partial(_threads_of, launch)
    guesses = guess_times(candidate_configs, known.trials, place, threads_of)
    estimator = TimeEstimator(guesses, load_slowdowns(candidate_configs, known.trials, threads_of))
    design = CompareDesign(
        ranks=shape.ranks,
        hosts=shape.hosts,
        ranks_per_host=shape.ranks_per_host,
        **dataclasses.asdict(place),
        gpus=gpus_to_use(base),
        threads=launch.threads or threads_per_rank(shape.ranks_per_host),
        requested_threads=launch.threads,
        repeats=config.repeats,
        max_repeats=config.max_repeats,
        interim_analyses=config.interim_analyses,
        reference=reference_of(candidates).name,
        proof=config.proof,
        target=known.target,
        batch=known.batch,
    )
    with leader:
        description = CompareDescription(
            kind=COMPARE_KIND,
            candidates=candidates,
            config=target.settings(candidate_configs),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, COMPARE_KIND), description)
        on_folder(folder.path)
        display.plan(design, [candidate.name for candidate in candidates], candidate_configs[0].config)
        CompareExperiment(target, candidate_configs, leader, config, folder, display, estimator=estimator).run()


def _threads_of(launch: LaunchConfig, one: CandidateConfig) -> int:
    """Return the compute threads of each rank of a candidate, as ranks choose them."""
    roles = create(one.config.strategy).roles(one.shape.ranks)[: one.shape.ranks_per_host]
    return launch.threads or threads_per_rank(max(1, sum(role is not Role.IDLE for role in roles)))

"""`paceline race`: train one candidate several times until each run reaches a test accuracy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.record_set import collect_records
from paceline.analysis.remaining_time import TimeEstimator
from paceline.config import LaunchConfig, RaceConfig, RunConfig
from paceline.config.race import DEFAULT_EPOCHS
from paceline.errors import DivergenceError
from paceline.experiments.candidates import WORKLOAD_RULES, CandidateConfig, role_of
from paceline.experiments.checks import choose_shape, gpus_to_use, settings_of
from paceline.experiments.engine import Experiment, ProgressDisplay
from paceline.experiments.estimate import guess_times, load_slowdowns
from paceline.experiments.scaling.machines import detect_machines
from paceline.experiments.train import new_folder
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.channel.own_command import OwnCommand
from paceline.launch.launcher_process import Notify, Shape
from paceline.launch.leader import join_launch
from paceline.launch.rank_assignment import find_launcher_process
from paceline.measure.cores import threads_per_rank
from paceline.records import provenance
from paceline.records.experiment.design import Candidate, RaceDescription, RaceDesign
from paceline.records.experiment.folder import ExperimentFolder
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
    known = target.describe([one], shape.ranks) if launcher.is_leader else None
    settings = settings_of(RACE_KIND, launch, config, base)
    command = OwnCommand(configs=(one.config,))
    leader = join_launch(launcher, launch, settings, command, timeout_s=base.timeout_s, notify=notify)
    if leader is None:
        return
    assert known is not None, "the leader describes the target"
    place = detect_machines(leader.launcher_infos)
    threads = launch.threads or threads_per_rank(shape.ranks_per_host)
    guesses = guess_times([one], known.trials, place, lambda _: threads)
    estimator = TimeEstimator(guesses, load_slowdowns([one], known.trials, lambda _: threads))
    design = RaceDesign(
        ranks=shape.ranks,
        hosts=shape.hosts,
        ranks_per_host=shape.ranks_per_host,
        **dataclasses.asdict(place),
        gpus=gpus_to_use(base),
        threads=threads,
        requested_threads=launch.threads,
        repeats=config.runs,
        max_repeats=config.runs,
        interim_analyses=1,
        reference=one.candidate.name,
        proof=False,
        target=known.target,
        batch=known.batch,
        target_accuracy=config.target_accuracy,
        eval_every=config.eval_every,
        tta=base.tta,
        seed=base.seed,
    )
    with leader:
        description = RaceDescription(
            kind=RACE_KIND,
            candidates=[one.candidate],
            config=target.settings([one]),
            design=design,
            provenance=provenance(),
        )
        folder = ExperimentFolder.create(out or new_folder(base, RACE_KIND), description)
        on_folder(folder.path)
        display.plan(design, [one.candidate.name], one.config)
        RaceExperiment(target, [one], leader, config, folder, display, estimator=estimator).run()


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

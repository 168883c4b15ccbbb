"""`paceline large-batch`: train a reference and large batches, plain and with remedies, at equal epochs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.record_set import collect_records
from paceline.config import DEFAULT_STRATEGY, LargeBatchConfig, LaunchConfig, RunConfig
from paceline.config.large_batch import DEFAULT_EPOCHS
from paceline.config.run import EPOCH
from paceline.errors import DivergenceError, UsageError
from paceline.experiments.checks import choose_shape, gpus_to_use
from paceline.experiments.engine import Experiment, ProgressDisplay
from paceline.experiments.large_batches.candidates import make_large_batch_candidates
from paceline.experiments.large_batches.trained_workload import examine_workload, with_plain_recipe
from paceline.experiments.names import check_names, prepare_data
from paceline.experiments.one_shape import OneShapePlan, measure_on_one_shape
from paceline.experiments.training_targets import WorkloadTarget
from paceline.formatting import plural, short
from paceline.launch.launcher_process import Notify
from paceline.launch.rank_assignment import find_launcher_process
from paceline.records.experiment.design import LargeBatchDesign
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import LARGE_BATCH_KIND

MICRO_BATCH_ON_GPU, MICRO_BATCH_ON_CPU = 8192, 1024
"""Most samples in a forward pass by default. On a CPU, activations of larger ones no longer fit its caches."""


@dataclass
class LargeBatchExperiment(Experiment):
    """An experiment with large batches in progress."""

    def enough(self, repeats: int) -> bool:
        comparison = compare_records(collect_records([read_experiment(self.folder.path)]))
        if self.first_error is not None and all(row.step_s is None for row in comparison.rows):
            raise self.first_error
        self.expect_repeats(repeats)
        self.display.refresh(comparison, repeats)
        return repeats >= self.config.repeats

    def leaves_out(self, error_kind: str) -> bool:
        """Return whether an error leaves a candidate out: one whose loss diverges with one seed may train with another.

        That large batches diverge is a result.
        """
        return error_kind != DivergenceError.__name__


def large_batch(
    base: RunConfig,
    launch: LaunchConfig,
    config: LargeBatchConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run an experiment with large batches. Its folder holds what was measured, even after an interrupt.

    Calls `on_folder` with the folder as soon as it exists; only on the leader.
    """
    base = replace(with_plain_recipe(base), epochs=base.epochs or DEFAULT_EPOCHS, eval_every=base.eval_every or EPOCH)
    if config.warmup_epochs is not None and config.warmup_epochs >= base.most_epochs:
        epochs = plural(base.most_epochs, "epoch")
        raise UsageError(
            f"--warmup-epochs {short(config.warmup_epochs)} is not less than the {epochs} of a run.",
            hint="the warm-up is the first part of a run: name fewer epochs",
        )
    check_names(base)
    launcher = find_launcher_process(launch, os.environ)
    prepare_data(base)
    workload, gpus = examine_workload(base), gpus_to_use(base)
    shape = choose_shape(base, launch, launcher)
    if shape.ranks == 1 and base.strategy == DEFAULT_STRATEGY:
        base = replace(base, strategy="single")
    micro_batch = config.micro_batch or (MICRO_BATCH_ON_GPU if gpus else MICRO_BATCH_ON_CPU)
    made = make_large_batch_candidates(base, config, workload, shape, micro_batch)
    plan = OneShapePlan(
        kind=LARGE_BATCH_KIND,
        base=base,
        launch=launch,
        config=config,
        shape=shape,
        target=WorkloadTarget(),
        candidate_configs=made.candidate_configs,
        reference=made.reference.candidate.name,
        # Batches and remedies change the time of a sample too little to try each of them.
        tried=[made.reference],
        experiment=LargeBatchExperiment,
        design=LargeBatchDesign,
        own_design={
            "batch": None,
            "reference_batch": config.reference,
            "sizes": made.sizes,
            "epochs": base.most_epochs,
            "warmup_epochs": config.warmup_length(base.most_epochs),
            "micro_batch": micro_batch,
            "left_out": made.left_out,
        },
        notes=made.left_out,
    )
    measure_on_one_shape(plan, launcher, out, display, on_folder, notify)

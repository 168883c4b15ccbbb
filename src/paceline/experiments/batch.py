"""`paceline batch`: measure batch sizes on several world sizes, interleaved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from paceline.config import BatchConfig, LaunchConfig, RunConfig
from paceline.config.recipe import AUTO_PRECISION
from paceline.errors import UsageError
from paceline.experiments.batch_sizes.core_speed import measure_core_speed
from paceline.experiments.batch_sizes.points import choose_batch_shapes, make_batch_points, without_too_large
from paceline.experiments.engine import ProgressDisplay
from paceline.experiments.estimate import Trials, run_trials
from paceline.experiments.points import PointGrid, measure_points
from paceline.experiments.scaling.points import Points
from paceline.launch.launcher_process import LauncherProcess, Notify, Shape
from paceline.measure.bf16_instructions import has_bf16_instructions
from paceline.records.experiment.design import BatchDesign
from paceline.records.schema import BATCH_KIND
from paceline.workloads.recipes import choose_recipe


@dataclass(frozen=True)
class BatchGrid(PointGrid[BatchConfig]):
    """Every batch size on every shape."""

    kind: ClassVar[str] = BATCH_KIND

    def __post_init__(self) -> None:
        """Raise for settings of tests if the runs have a number of steps, since only trained runs are tested."""
        given = {"--eval-every": self.base.eval_every, "--eval-ranks": self.base.eval_ranks}
        option = next((name for name, value in given.items() if value), None)
        if option is not None and not self.trains:
            raise UsageError(
                f"{option} needs runs that are trained and tested.", hint="use --epochs or --seconds instead of --steps"
            )

    @property
    def trains(self) -> bool:
        """Whether runs train for whole epochs or a time, so that their losses and accuracies are compared."""
        return self.base.steps is None

    def choose_shapes(self, launcher: LauncherProcess, on_one_host: int) -> list[Shape]:
        return choose_batch_shapes(self.config, launcher, on_one_host)

    def make_points(self, shapes: list[Shape]) -> Points:
        base = replace(self.base, evaluate=self.base.evaluate and self.trains, batch_per_rank=None)
        return make_batch_points(base, self.config, shapes)

    def run_trials(self, points: Points) -> tuple[Points, Trials]:
        trials = run_trials(points.candidate_configs, check_batches=False)
        samples = next((trial.train_samples for trial in trials.values()), None)
        return without_too_large(points, samples), trials

    def design(self, points: Points, trials: Trials, shared: dict[str, Any]) -> BatchDesign:
        trained_in = next((trial.precision for trial in trials.values()), None)  # Of a user's recipe, too.
        precision = trained_in or choose_recipe(self.base).precision
        core = None if shared["gpus"] else measure_core_speed(precision)
        may_be_bf16 = core is not None and precision == AUTO_PRECISION and has_bf16_instructions()
        return BatchDesign(
            **shared,
            sizes=list(self.config.batch_sizes),
            per_rank=self.config.per_rank,
            trains=self.trains,
            core_flop_per_s=None if core is None else core.flop_per_s,
            core_bf16_flop_per_s=measure_core_speed("bf16").flop_per_s if may_be_bf16 else None,
            core_other_load=None if core is None else core.other_load,
            left_out=points.left_out,
            batch=None,
        )


def batch(
    base: RunConfig,
    launch: LaunchConfig,
    config: BatchConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run an experiment over batch sizes, as `measure_points` describes."""
    measure_points(lambda base: BatchGrid(base, config), base, launch, out, display, on_folder, notify)

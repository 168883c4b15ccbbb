"""`paceline scale`: measure strategies at several world sizes, strong and weak, interleaved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from paceline.config import LaunchConfig, RunConfig, ScaleConfig
from paceline.experiments.engine import ProgressDisplay
from paceline.experiments.estimate import Trials, run_trials
from paceline.experiments.points import PointGrid, measure_points
from paceline.experiments.scaling.points import Points, ScaleBatches, make_points
from paceline.experiments.scaling.shapes import choose_shapes
from paceline.launch.launcher_process import LauncherProcess, Notify, Shape
from paceline.records.experiment.design import ScaleDesign
from paceline.records.schema import SCALE_KIND


@dataclass(frozen=True)
class ScaleGrid(PointGrid[ScaleConfig]):
    """Strategies on every shape, at the batches of strong and weak scaling."""

    kind: ClassVar[str] = SCALE_KIND

    def choose_shapes(self, launcher: LauncherProcess, on_one_host: int) -> list[Shape]:
        return choose_shapes(self.config, launcher, on_one_host)

    def make_points(self, shapes: list[Shape]) -> Points:
        base = replace(self.base, evaluate=False, batch_per_rank=None)
        return Points(make_points(base, self.config, shapes), shapes)

    def run_trials(self, points: Points) -> tuple[Points, Trials]:
        return points, run_trials(points.candidate_configs)

    def design(self, points: Points, _: Trials, shared: dict[str, Any]) -> ScaleDesign:
        batches = ScaleBatches.of(self.config, points.most_ranks)
        return ScaleDesign(**shared, modes=list(self.config.modes), batch=batches.whole, batch_per_rank=batches.share)


def scale(
    base: RunConfig,
    launch: LaunchConfig,
    config: ScaleConfig,
    out: Path | None,
    display: ProgressDisplay,
    on_folder: Callable[[Path], None],
    notify: Notify,
) -> None:
    """Run a scaling experiment, as `measure_points` describes."""
    measure_points(lambda base: ScaleGrid(base, config), base, launch, out, display, on_folder, notify)

"""`paceline scale`: measure strategies over several world sizes, with strong and weak scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from paceline.cli.experiment_requests import Measure, PointsRequest
from paceline.config import ScaleConfig, settings_unused_by

if TYPE_CHECKING:
    from paceline.report.live.live_table import LiveTable


@dataclass(frozen=True, kw_only=True)
class ScaleRequest(PointsRequest):
    """Measure how strategies scale with the number of ranks.

    Reports time per step, speed-up and efficiency, relative to one process without communication and to the same
    strategy on one rank. Strong scaling keeps the global batch fixed, weak scaling the batch per rank.

    Ctrl-C stops the measurement and reports the runs measured so far. The same command with --out of that folder goes
    on.
    """

    command: ClassVar[str] = "scale"
    without: ClassVar[frozenset[str]] = settings_unused_by("scale")
    help_texts: ClassVar[Mapping[str, str]] = {
        "steps": "Steps of each run [default: 20, unless --epochs or --seconds is given].",
        "epochs": "Train each run for this many epochs instead.",
        "threads": PointsRequest.threads_help,
        "ranks": "World sizes, as in 1,2,4; 1 is always measured "
        "[default: powers of two up to the cores or GPUs available].",
    }

    scale: ScaleConfig

    @property
    def points(self) -> ScaleConfig:
        return self.scale

    def experiment(self) -> tuple[type[LiveTable], Measure]:
        from paceline.experiments.scale import scale
        from paceline.report.live.scaling_table import ScalingLiveTable

        return ScalingLiveTable, partial(scale, self.run, self.launch, self.scale, self.out)

"""Live display of an experiment over batch sizes, with one point per size and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import RunConfig
from paceline.formatting import join_names, whole
from paceline.records.experiment.design import BatchDesign, Design, PointsDesign
from paceline.report.live.scaling_table import ScalingLiveTable, format_points_plan


class BatchLiveTable(ScalingLiveTable):
    """Live display of an experiment over batch sizes; where the console is not a terminal, one line per repeat."""

    shown = ("step_s", "samples_per_s", "exposed")

    def plan(self, design: Design, candidates: Sequence[str], config: RunConfig) -> None:
        """Print the planned points, the sizes that are left out, and where ranks will share cores."""
        assert isinstance(design, BatchDesign)
        super().plan(design, candidates, config)
        for sentence in design.left_out:
            self._print(sentence)

    def format_points(self, design: PointsDesign, config: RunConfig) -> str:
        """Format the planned points as one line."""
        assert isinstance(design, BatchDesign)
        kind = "batches per rank" if design.per_rank else "global batches"
        return format_points_plan(design, f"{kind} {join_names([whole(size) for size in design.sizes])}", config)

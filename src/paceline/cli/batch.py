"""`paceline batch`: measure batch sizes over several world sizes, and what larger ones cost in accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from paceline.cli.experiment_requests import Measure, PointsRequest
from paceline.config import BatchConfig, settings_unused_by

if TYPE_CHECKING:
    from paceline.report.live.live_table import LiveTable


@dataclass(frozen=True, kw_only=True)
class BatchRequest(PointsRequest):
    """Measure which batch size trains fastest, what limits it, and what it costs in accuracy.

    Reports for each batch size and world size: time per epoch with and without data loading, samples per second,
    memory, CPU use, model FLOP utilisation, computation and communication, and bandwidth utilisation. With --epochs,
    also losses and accuracies, at equal epochs and at equal time.

    A batch size that needs too much memory is reported as such, and the others are measured. Ctrl-C stops the
    measurement and reports the runs measured so far. The same command with --out of that folder goes on.
    """

    command: ClassVar[str] = "batch"
    without: ClassVar[frozenset[str]] = settings_unused_by("batch")
    help_texts: ClassVar[Mapping[str, str]] = {
        "strategy": "Way of synchronising gradients on several ranks; one rank trains as `single` [default: ddp].",
        "steps": "Steps of each run [default: 20, unless --epochs or --seconds is given]; "
        "the time of an epoch is then extrapolated.",
        "epochs": "Train each run for this many epochs instead, to compare losses and accuracies too.",
        "evaluate": "Test the synchronised weights at the end of a run with --epochs or --seconds.",
        "threads": PointsRequest.threads_help,
    }

    batch_sizes: BatchConfig

    @property
    def points(self) -> BatchConfig:
        return self.batch_sizes

    def experiment(self) -> tuple[type[LiveTable], Measure]:
        from paceline.experiments.batch import batch
        from paceline.report.live.batch_table import BatchLiveTable

        return BatchLiveTable, partial(batch, self.run, self.launch, self.batch_sizes, self.out)

"""`paceline large-batch`: measure what large batches lose in accuracy, and which remedy repairs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from paceline.cli.experiment_requests import ExperimentRequest, Measure
from paceline.config import LargeBatchConfig, settings_unused_by

if TYPE_CHECKING:
    from paceline.report.live.live_table import LiveTable


@dataclass(frozen=True, kw_only=True)
class LargeBatchRequest(ExperimentRequest):
    """Measure what large batches lose in accuracy, and which remedy repairs it.

    Trains a reference batch; then each large batch at equal epochs: plain, with each remedy, and with all together.
    Remedies are linear scaling of the learning rate, warm-up, zero-gamma and LARS. Reports accuracies and losses over
    several seeds, how much of the loss in accuracy each remedy repairs, and whether the gradient noise scale of the
    reference predicted where large batches stop paying.

    A batch larger than what a rank can train at once is accumulated over several forward passes, so no cluster is
    needed. The built-in models are trained by the recipe classic if no other is given.

    Ctrl-C stops the measurement and reports the runs measured so far. The same command with --out of that folder goes
    on.
    """

    command: ClassVar[str] = "large-batch"
    without: ClassVar[frozenset[str]] = settings_unused_by("large-batch")
    help_texts: ClassVar[Mapping[str, str]] = {
        "epochs": "Epochs of each run [default: 30].",
        "recipe": "Recipe of the reference: default, classic, or a TOML file; without its warm-up, its scaling of the "
        "learning rate and its zero-gamma [default: classic; for your own workload, its own].",
        "lr": "Learning rate of the reference, and of plain training [default: the recipe's].",
        "seed": "Seed of the first runs; the others have the following ones.",
        "eval_every": "Test the synchronised weights after every N steps, or after every epoch (epoch) "
        "[default: epoch].",
    }

    large_batch: LargeBatchConfig

    def experiment(self) -> tuple[type[LiveTable], Measure]:
        from paceline.experiments.large_batch import large_batch
        from paceline.report.live.large_batch_table import LargeBatchLiveTable

        return LargeBatchLiveTable, partial(large_batch, self.run, self.launch, self.large_batch, self.out)

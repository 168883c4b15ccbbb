"""`paceline compare`: measure strategies side by side and recommend one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from paceline.cli.experiment_requests import ExperimentRequest, Measure
from paceline.config import CompareConfig, settings_unused_by

if TYPE_CHECKING:
    from paceline.report.live.live_table import LiveTable


@dataclass(frozen=True, kw_only=True)
class CompareRequest(ExperimentRequest):
    """Compare strategies side by side and recommend one.

    First proves that every strategy computes the same mean gradient. Then measures short runs of all strategies,
    interleaved, until the fastest is clear or --max-repeats is reached. An HTML report explains the differences.

    With --script, the strategies are compared in your own training script; its arguments follow `--`.

    Ctrl-C stops the measurement and reports the runs measured so far. The same command with --out of that folder goes
    on.
    """

    command: ClassVar[str] = "compare"
    without: ClassVar[frozenset[str]] = settings_unused_by("compare")
    help_texts: ClassVar[Mapping[str, str]] = {
        "steps": "Steps of each run [default: 40, unless --epochs or --seconds is given].",
        "epochs": "Train each run for this many epochs instead, to compare final losses and accuracies too.",
    }

    compare: CompareConfig
    script_arguments: tuple[str, ...] = ()
    """Arguments of the user's script."""

    def experiment(self) -> tuple[type[LiveTable], Measure]:
        from paceline.experiments.compare import compare
        from paceline.report.live.live_table import LiveTable

        measure = partial(compare, self.run, self.launch, self.compare, self.out, script_args=self.script_arguments)
        return LiveTable, measure

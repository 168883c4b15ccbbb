"""`paceline compare`: measure strategies side by side and recommend one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.cli.experiment_output import run_and_report
from paceline.cli.messages import display_console, message_printer
from paceline.cli.requests import LaunchRequest
from paceline.config import CompareConfig, settings_unused_by


@dataclass(frozen=True, kw_only=True)
class CompareRequest(LaunchRequest):
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

    def carry_out(self) -> int:
        """Run the comparison and report its results."""
        from paceline.experiments.compare import compare
        from paceline.report.live.live_table import LiveTable

        messages = display_console()
        display, notify = LiveTable(messages), message_printer(messages)
        return run_and_report(
            lambda on_folder: compare(
                self.run, self.launch, self.compare, self.out, display, on_folder, notify, self.script_arguments
            ),
            display,
            messages,
            as_json=self.as_json,
            trace=self.run.trace,
        )

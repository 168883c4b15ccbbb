"""`paceline batch`: measure batch sizes over several world sizes, and what larger ones cost in accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.cli.experiment_output import run_and_report
from paceline.cli.messages import display_console, message_printer
from paceline.cli.requests import LaunchRequest, RequestedRanks
from paceline.config import BatchConfig, settings_unused_by
from paceline.launch.launcher_process import LauncherProcess, Shape


@dataclass(frozen=True, kw_only=True)
class BatchRequest(LaunchRequest):
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
        "threads": "CPU threads per rank [default: usable cores ÷ ranks per host; "
        "on one machine, the same for every world size].",
    }

    batch_sizes: BatchConfig

    def carry_out(self) -> int:
        """Run the experiment and report its results."""
        from paceline.experiments.batch import batch
        from paceline.report.live.batch_table import BatchLiveTable

        messages = display_console()
        display, notify = BatchLiveTable(messages), message_printer(messages)
        return run_and_report(
            lambda on_folder: batch(self.run, self.launch, self.batch_sizes, self.out, display, on_folder, notify),
            display,
            messages,
            as_json=self.as_json,
            trace=self.run.trace,
        )

    def requested_ranks(self) -> RequestedRanks:
        """Return the largest of the world sizes, and of the ranks per host, that the command line sets."""
        sizes = self.batch_sizes
        return RequestedRanks(max(sizes.rank_counts, default=0), max(sizes.per_host, default=0), exact=False)

    def check_job_shape(self, shape: Shape) -> None:
        """Raise if the world sizes cannot be spread evenly over the hosts of the job."""
        from paceline.experiments.scaling.shapes import choose_shapes

        launcher = LauncherProcess(launchers=shape.ranks, ranks=1, local_size=shape.ranks_per_host, started_by="slurm")
        choose_shapes(self.batch_sizes, launcher, on_one_host=shape.ranks_per_host)

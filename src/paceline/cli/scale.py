"""`paceline scale`: measure strategies over several world sizes, with strong and weak scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.cli.experiment_output import run_and_report
from paceline.cli.messages import display_console, message_printer
from paceline.cli.requests import LaunchRequest, RequestedRanks
from paceline.config import ScaleConfig, settings_unused_by
from paceline.launch.launcher_process import LauncherProcess, Shape


@dataclass(frozen=True, kw_only=True)
class ScaleRequest(LaunchRequest):
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
        "threads": "CPU threads per rank [default: usable cores ÷ ranks per host; "
        "on one machine, the same for every world size].",
    }

    scale: ScaleConfig

    def carry_out(self) -> int:
        """Run the scaling experiment and report its results."""
        from paceline.experiments.scale import scale
        from paceline.report.live.scaling_table import ScalingLiveTable

        messages = display_console()
        display, notify = ScalingLiveTable(messages), message_printer(messages)
        return run_and_report(
            lambda on_folder: scale(self.run, self.launch, self.scale, self.out, display, on_folder, notify),
            display,
            messages,
            as_json=self.as_json,
            trace=self.run.trace,
        )

    def requested_ranks(self) -> RequestedRanks:
        """Return the largest of the world sizes, and of the ranks per host, that the command line sets."""
        return RequestedRanks(max(self.scale.rank_counts, default=0), max(self.scale.per_host, default=0), exact=False)

    def check_job_shape(self, shape: Shape) -> None:
        """Raise if the world sizes cannot be spread evenly over the hosts of the job."""
        from paceline.experiments.scaling.shapes import choose_shapes

        launcher = LauncherProcess(launchers=shape.ranks, ranks=1, local_size=shape.ranks_per_host, started_by="slurm")
        choose_shapes(self.scale, launcher, on_one_host=shape.ranks_per_host)

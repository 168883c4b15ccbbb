"""Requests of experiments: measure, show the progress, and report whatever was measured."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.cli.experiment_output import run_and_report
from paceline.cli.messages import display_console, message_printer
from paceline.cli.requests import LaunchRequest, RequestedRanks
from paceline.config import PointsConfig
from paceline.launch.launcher_process import LauncherProcess, Notify, Shape

if TYPE_CHECKING:
    from paceline.report.live.live_table import LiveTable


class Measure(Protocol):
    """Function that measures an experiment."""

    def __call__(self, display: LiveTable, on_folder: Callable[[Path], None], notify: Notify) -> None:
        """Measure; call `on_folder` with the folder of the experiment as soon as it exists."""


@dataclass(frozen=True, kw_only=True)
class ExperimentRequest(LaunchRequest):
    """Arguments of a command that measures an experiment."""

    @abstractmethod
    def experiment(self) -> tuple[type[LiveTable], Measure]:
        """Return the display of the experiment, and the function that measures it."""

    def carry_out(self) -> int:
        """Run the experiment and report its results."""
        display_type, measure = self.experiment()
        messages = display_console()
        display, notify = display_type(messages), message_printer(messages)
        return run_and_report(
            lambda on_folder: measure(display, on_folder, notify),
            display,
            messages,
            as_json=self.as_json,
            trace=self.run.trace,
        )


@dataclass(frozen=True, kw_only=True)
class PointsRequest(ExperimentRequest):
    """Arguments of a command that measures points: candidates on several shapes of ranks."""

    threads_help: ClassVar[str] = (
        "CPU threads per rank [default: usable cores ÷ ranks per host; on one machine, the same for every world size]."
    )

    @property
    @abstractmethod
    def points(self) -> PointsConfig:
        """Settings of the points."""

    def requested_ranks(self) -> RequestedRanks:
        """Return the largest of the world sizes, and of the ranks per host, that the command line sets."""
        points = self.points
        return RequestedRanks(max(points.rank_counts, default=0), max(points.per_host, default=0), exact=False)

    def check_job_shape(self, shape: Shape) -> None:
        """Raise if the world sizes cannot be spread evenly over the hosts of the job."""
        from paceline.experiments.scaling.shapes import choose_shapes

        launcher = LauncherProcess(launchers=shape.ranks, ranks=1, local_size=shape.ranks_per_host, started_by="slurm")
        choose_shapes(self.points, launcher, on_one_host=shape.ranks_per_host)

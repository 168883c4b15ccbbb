"""Experiment over points, and the parts of its design that do not depend on what varies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.analysis.comparison import compare
from paceline.analysis.record_set import collect_records
from paceline.config import LaunchConfig, PointsConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.engine import Experiment
from paceline.experiments.scaling.machines import ThreadCounts
from paceline.experiments.scaling.points import Points
from paceline.experiments.training_targets import ScheduledRun
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.measure.cores import threads_per_rank
from paceline.records.experiment.design import ScaleShape
from paceline.records.experiment.record import read_experiment
from paceline.workloads.names import is_user_workload


@dataclass
class PointsExperiment(Experiment):
    """An experiment over points in progress: ends after its repeats."""

    threads: ThreadCounts = field(default_factory=lambda: ThreadCounts(None, None))

    def to_prove(self) -> list[CandidateConfig]:
        """Return every strategy once, at its largest world size and most hosts."""
        largest: dict[str, CandidateConfig] = {}
        for candidate_config in sorted(super().to_prove(), key=lambda one: (one.shape.ranks, one.shape.hosts)):
            if candidate_config.candidate.role != "baseline":
                largest[candidate_config.candidate.strategy] = candidate_config
        return list(largest.values())

    def threads_of(self, run: ScheduledRun) -> int | None:
        return self.threads.single if run.candidate_config.candidate.role == "baseline" else self.threads.rank

    def place_of(self, candidate_config: CandidateConfig) -> str:
        """Return the folder name of the launch; a baseline with another number of threads has its own launch."""
        apart = candidate_config.candidate.role == "baseline" and self.threads.single != self.threads.rank
        return super().place_of(candidate_config) + ("-single" if apart else "")

    def enough(self, repeats: int) -> bool:
        found = compare(collect_records([read_experiment(self.folder.path)]))
        if self.first_error is not None and all(row.step_s is None for row in found.rows):
            raise self.first_error
        self.expect_repeats(repeats)
        self.display.refresh(found, repeats)
        return repeats >= self.config.repeats


def point_threads(threads: ThreadCounts, one: CandidateConfig) -> int:
    """Return the compute threads of each rank of a point."""
    given = threads.single if one.candidate.role == "baseline" else threads.rank
    return given or threads_per_rank(one.shape.ranks_per_host)


def check_gpus(base: RunConfig, shapes: Sequence[Shape], gpus: int, launcher: LauncherProcess) -> None:
    """Raise if NCCL is requested and a rank would have no GPU of its own."""
    most = max(shape.ranks_per_host for shape in shapes)
    if base.backend == "nccl" and most > gpus and launcher.ranks is None:
        raise UsageError(
            f"nccl needs one GPU per rank, but this host has {gpus} for {most} ranks.",
            hint=f"use --ranks up to {gpus} or --backend gloo" if gpus else "use --backend gloo",
        )


def target_name(base: RunConfig) -> str:
    """Return the name of the workload, with its data set if it is a built-in one."""
    return base.workload if is_user_workload(base.workload) else f"{base.workload} on {base.data}"


def points_design(config: PointsConfig, points: Points, threads: ThreadCounts, launch: LaunchConfig) -> dict[str, Any]:
    """Return the part of the design that follows from the points."""
    largest = max(points.shapes, key=lambda shape: (shape.ranks, shape.hosts))
    candidates = [one.candidate for one in points.candidate_configs]
    reference = next((one for one in candidates if one.role == "baseline"), candidates[0])
    return {
        "ranks": largest.ranks,
        "hosts": largest.hosts,
        "shapes": [ScaleShape(hosts=shape.hosts, ranks_per_host=shape.ranks_per_host) for shape in points.shapes],
        "strategies": list(dict.fromkeys(candidate.strategy for candidate in candidates)),
        "threads": threads.rank or threads_per_rank(largest.ranks_per_host),
        "single_threads": threads.single or threads_per_rank(1),
        "requested_threads": launch.threads,
        "requested_ranks_per_host": list(config.per_host),
        "repeats": config.repeats,
        "max_repeats": config.repeats,
        "interim_analyses": 1,
        "reference": reference.name,
        "proof": config.proof,
    }

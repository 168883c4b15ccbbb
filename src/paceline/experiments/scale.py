"""`scale`: strategies over numbers of ranks, strong and weak, measured interleaved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.analysis.pool import pool
from paceline.analysis.scaling import KIND, scaling
from paceline.config import LaunchConfig, RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.checks import gpus_to_use, place_settings, settings_of
from paceline.experiments.contenders import Entrant
from paceline.experiments.experiment import Board, Experiment
from paceline.experiments.names import prepare_data
from paceline.experiments.scale_estimate import estimate_s
from paceline.experiments.scale_machines import (
    Threads,
    are_bound,
    choose_threads,
    find_machines,
    machine_cores,
    own_quota,
)
from paceline.experiments.scale_points import Batches, make_points, shared_settings
from paceline.experiments.shapes import choose_shapes
from paceline.experiments.subjects import Turn, Workloads
from paceline.experiments.train import new_folder
from paceline.launch.fleet import join_fleet
from paceline.launch.seat import Say, Seat, Shape
from paceline.launch.seating import find_seat
from paceline.measure.cores import threads_per_rank
from paceline.records import provenance
from paceline.records.experiment import ExperimentFolder, read_experiment
from paceline.training.windows import WARM_UP_STEPS
from paceline.workloads.names import is_own

DEFAULT_STEPS = 20


@dataclass
class Ladder(Experiment):
    """A scaling experiment while it goes on: it ends after its repeats."""

    threads: Threads = field(default_factory=lambda: Threads(None, None))

    def to_prove(self) -> list[Entrant]:
        """Every strategy once, on the most ranks and hosts that it is measured on."""
        largest: dict[str, Entrant] = {}
        for entrant in sorted(super().to_prove(), key=lambda one: (one.shape.ranks, one.shape.hosts)):
            if entrant.contender.role != "baseline":
                largest[entrant.contender.strategy] = entrant
        return list(largest.values())

    def threads_of(self, turn: Turn) -> int | None:
        return self.threads.single if turn.entrant.contender.role == "baseline" else self.threads.rank

    def place_of(self, entrant: Entrant) -> str:
        """What computes with more threads than the ranks of its shape has processes of its own."""
        apart = entrant.contender.role == "baseline" and self.threads.single != self.threads.rank
        return super().place_of(entrant) + ("-single" if apart else "")

    def enough(self, repeats: int) -> bool:
        found = scaling(pool([read_experiment(self.folder.path)]))
        if self.first_error is not None and all(row.step_s is None for row in found.comparison.rows):
            raise self.first_error
        self.board.look(found.comparison, repeats)
        return repeats >= self.config.repeats


def scale(
    base: RunConfig,
    launch: LaunchConfig,
    config: ScaleConfig,
    out: Path | None,
    board: Board,
    tell_folder: Callable[[Path], None],
    say: Say,
) -> None:
    """Runs a whole scaling experiment. Its folder, told as soon as it is there, holds what was done until then.

    No folder is told on a host that only takes part: all but the first.
    """
    seat = find_seat(launch, os.environ)
    if base.steps is None and base.epochs is None and base.seconds is None:
        base = replace(base, steps=DEFAULT_STEPS)
    if base.steps is not None and base.steps <= WARM_UP_STEPS:
        raise UsageError(
            f"--steps {base.steps} leaves nothing to measure: the first {WARM_UP_STEPS} steps warm up.",
            hint="use --steps 20, or leave it out",
        )
    gpus = gpus_to_use(base)
    cores = machine_cores()
    shapes = choose_shapes(config, seat, on_one_host=gpus or max(2, int(cores)))
    _check_gpus(base, shapes, gpus, seat)
    entrants = make_points(replace(base, evaluate=False, batch_per_rank=None), config, shapes)
    prepare_data(base)
    settings = settings_of("scale", launch, base) | dataclasses.asdict(config)  # Whose ranks are lists.
    fleet = join_fleet(seat, launch, settings, timeout_s=base.timeout, say=say)
    if fleet is None:
        return
    with fleet:
        place = place_settings() | {"machine_cores": cores}
        place |= {"machines": find_machines(fleet.hellos, emulated=place["emulated"] is not None, quota=own_quota())}
        place |= {"bound": are_bound(fleet.hellos)}
        threads = choose_threads(shapes, launch, place, gpus)
        expected_s = estimate_s(entrants, config, place)
        design = _design(config, entrants, shapes, threads, launch) | place | {"gpus": gpus, "estimate_s": expected_s}
        folder = ExperimentFolder.create(
            out or new_folder(base, KIND),
            kind=KIND,
            contenders=[entrant.contender for entrant in entrants],
            config=shared_settings(dataclasses.asdict(entrants[0].config)),
            design=design,
            provenance=provenance(),
        )
        tell_folder(folder.path)
        board.plan(design | {"subject": _subject(base)}, entrants[0].config)
        Ladder(Workloads(), entrants, fleet, config, folder, board, threads=threads).run()


def _check_gpus(base: RunConfig, shapes: Sequence[Shape], gpus: int, seat: Seat) -> None:
    most = max(shape.ranks_per_host for shape in shapes)
    if base.backend == "nccl" and most > gpus and seat.ranks is None:
        raise UsageError(
            f"nccl needs a GPU of its own for each rank, but there are {gpus} for {most} ranks.",
            hint=f"use --ranks up to {gpus} or --backend gloo" if gpus else "use --backend gloo",
        )


def _subject(base: RunConfig) -> str:
    return base.workload if is_own(base.workload) else f"{base.workload} on {base.data}"


def _design(
    config: ScaleConfig, entrants: Sequence[Entrant], shapes: Sequence[Shape], threads: Threads, launch: LaunchConfig
) -> dict[str, Any]:
    largest = max(shapes, key=lambda shape: (shape.ranks, shape.hosts))
    batches = Batches.of(config, largest.ranks)
    return {
        "ranks": largest.ranks,
        "hosts": largest.hosts,
        "shapes": [{"hosts": shape.hosts, "ranks_per_host": shape.ranks_per_host} for shape in shapes],
        "modes": list(config.modes),
        "batch": batches.whole,
        "batch_per_rank": batches.share,
        "strategies": list(dict.fromkeys(entrant.contender.strategy for entrant in entrants)),
        "threads": threads.rank or threads_per_rank(largest.ranks_per_host),
        "threads_asked": launch.threads,
        "ranks_per_host_asked": list(config.per_host),
        "repeats": config.repeats,
        "max_repeats": config.repeats,
        "looks": 1,
        "reference": next(e.contender.name for e in entrants if e.contender.role == "baseline"),
        "proof": config.proof,
    }

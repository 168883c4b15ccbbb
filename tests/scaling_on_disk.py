"""Write scaling experiments to disk without training, through the same writers as real experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from experiments_on_disk import write_counts, write_run, write_timelines
from paceline.analysis.record_set import collect_records
from paceline.analysis.scaling.curves import Scaling, scaling
from paceline.config import RunConfig
from paceline.records import EventWriter
from paceline.records.events import EndEvent, FailureEvent, InterruptedEvent, ScheduledEvent
from paceline.records.experiment.design import Candidate, CandidatePoint, CandidateRole, PointMode, ScaleDescription
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import read_experiment
from run_models import PROVENANCE, scale_design

SAMPLES = 1280
"""Samples per epoch."""
ROLES: dict[str, CandidateRole] = {"single": "baseline", "none": "bound"}
HALF_CORES = {"machines": [0, 0, 0, 0], "machine_cores": 2.0, "host_cpus": 0.5, "emulated": "4@200mbit"}
"""Design with four hosts of half a core each."""
ONE_HOST = {"machines": [0], "machine_cores": 2.0, "host_cpus": None, "emulated": None}
"""Design with one host of two cores."""

StepTime = Callable[[Candidate, int], float]
"""Seconds per step of a candidate in a repeat."""
Shape = tuple[int, int]
"""Hosts and ranks per host."""


def even(candidate: Candidate, repeat: int) -> float:
    """Return 1 ms per sample of a rank's share, plus 10 ms (`ddp`) or 40 ms (others) per rank beyond the first."""
    assert candidate.point is not None
    ranks = candidate.point.ranks
    share = candidate.point.batch / ranks
    each = {"single": 0.0, "none": 0.0, "ddp": 0.010}.get(candidate.strategy, 0.040)
    return (0.001 * share + each * (ranks - 1)) * (1 + 0.02 * ((repeat + len(candidate.name)) % 3))


def points(
    strategies: Sequence[str], shapes: Sequence[Shape], modes: Sequence[str], batch: int, batch_per_rank: int
) -> Iterator[Candidate]:
    """Yield the candidates of an experiment by shape; `single` runs on one rank."""
    for hosts, per_host in shapes:
        ranks = hosts * per_host
        batches = {mode: batch if mode == "strong" else batch_per_rank * ranks for mode in modes}
        for whole in dict.fromkeys(batches.values()):
            own = [mode for mode in modes if batches[mode] == whole]
            mode = "both" if len(own) > 1 else own[0]
            point = CandidatePoint(
                mode=cast(PointMode, mode),
                ranks=ranks,
                hosts=hosts,
                ranks_per_host=per_host,
                batch=whole,
                batch_per_rank=whole / ranks,
            )
            for strategy in strategies:
                role = ROLES.get(strategy, "candidate")
                if role != "baseline" or ranks == 1:
                    name = f"{strategy} on {ranks} of {hosts}, batch {whole}"
                    yield Candidate(name, strategy, role=role, lossless=strategy != "none", point=point)


def write_scaling(
    path: Path,
    strategies: Sequence[str] = ("single", "ddp", "gather_scatter"),
    shapes: Sequence[Shape] = ((1, 1), (2, 1), (4, 1)),
    modes: Sequence[str] = ("strong", "weak"),
    *,
    repeats: int = 2,
    batch: int = 256,
    batch_per_rank: int = 64,
    step_s: StepTime = even,
    design: Mapping[str, Any] | None = None,
    cores: float = 0.5,
    threads: Mapping[str, int] | None = None,
    failures: Mapping[str, str] | None = None,
    interrupted: bool = False,
    events: bool = False,
    provenance: Mapping[str, Any] | None = None,
    lr: Callable[[int], float | None] = lambda _: 0.02,
) -> Path:
    """Write an experiment as `paceline scale` does, by default on hosts with half a core each.

    `lr` is the peak learning rate at a batch.
    """
    candidates = list(points(strategies, shapes, modes, batch, batch_per_rank))
    config = RunConfig(steps=12, batch=batch)
    shared = {key: value for key, value in asdict(config).items() if key not in ("strategy", "batch")}
    changes = {"command": "paceline scale --ranks 1,2,4", **(provenance or {})}
    about = msgspec.structs.replace(PROVENANCE, **changes)
    plan = scale_design(
        ranks=max(h * p for h, p in shapes),
        hosts=max(h for h, _ in shapes),
        repeats=repeats,
        max_repeats=repeats,
        reference=candidates[0].name,
        **(design or HALF_CORES),
    )
    description = ScaleDescription(kind="scale", candidates=candidates, config=shared, design=plan, provenance=about)
    folder = ExperimentFolder.create(path, description)
    event_writer = EventWriter(folder)
    for name, message in (failures or {}).items():
        failure = FailureEvent(candidate=name, stage="repeat 1", kind="RankError", message=message, hint="try again")
        event_writer.write(failure)
    for repeat in range(repeats):
        for number, candidate in enumerate(candidates):
            if candidate.name in (failures or {}):
                continue
            point = candidate.point
            assert point is not None
            where = f"repeat-{repeat + 1}/{number + 1}"
            event_writer.write(ScheduledEvent(candidate=candidate.name, repeat=repeat, folder=where))
            time_s, workers = step_s(candidate, repeat), point.ranks
            place = {"ranks_per_host": point.ranks_per_host, "batch": point.batch, "cores": cores}
            place |= {"threads": (threads or {}).get(candidate.strategy, 1), "lr": lr(point.batch)}
            own = replace(config, strategy=candidate.strategy, seed=repeat, batch=point.batch)
            epoch = -(-SAMPLES // point.batch)
            write_run(path / where, candidate, own, workers, [2.0] * 12, time_s, None, about, place, epoch)
            if events:
                write_timelines(path / where, candidate, workers, 12, time_s)
                write_counts(path / where, candidate, workers, 12)
    event_writer.write(InterruptedEvent() if interrupted else EndEvent())
    event_writer.close()
    return path


def write_superlinear(path: Path) -> Path:
    """Write an experiment on two cores, in which `single` with two threads takes nine times its usual time."""

    def step_s(candidate: Candidate, repeat: int) -> float:
        return even(candidate, repeat) * (9 if candidate.strategy == "single" else 1)

    shapes, threads = [(1, 1), (1, 2)], {"single": 2}
    return write_scaling(
        path, ["single", "ddp"], shapes, ["strong"], step_s=step_s, design=ONE_HOST, cores=2.0, threads=threads
    )


def read_scaling(path: Path) -> Scaling:
    """Read the results of a scaling experiment."""
    return scaling(collect_records([read_experiment(path)]))

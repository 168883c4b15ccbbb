"""Write experiments over batch sizes to disk without training, with numbers that can be checked by hand.

The training data has 640 samples, and every run trains two epochs of two windows each. The first epoch takes twice as
long as the second. Loading data takes 10% of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from experiments_on_disk import write_timelines
from paceline.analysis.batch.points import BatchSizes
from paceline.analysis.batch.sizes import batch_sizes
from paceline.analysis.record_set import collect_records
from paceline.config import RunConfig
from paceline.records import EventWriter, RunFolder
from paceline.records.description import RunDescription
from paceline.records.events import (
    EndEvent,
    EvaluationEvent,
    FailureEvent,
    InterruptedEvent,
    LogEvent,
    NoiseFigures,
    ScheduledEvent,
    StartEvent,
)
from paceline.records.experiment.design import BatchDescription, Candidate, CandidatePoint
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import StepRow
from paceline.records.summary import EvaluationResult, PlannedTraffic
from paceline.records.writer import StepWriter
from run_models import PROVENANCE, batch_design, rank_summary, recipe, summary, topology

SAMPLES = 640
LOSSES = (2.0, 1.0, 0.8, 0.4)
"""Training loss of each window."""
ACCURACIES = (0.25, 0.5, 0.625, 0.75)
"""Training accuracy of each window."""
STEP_S = {("single", 64): 0.10, ("single", 128): 0.16, ("ddp", 64): 0.08, ("ddp", 128): 0.10}
TEST_ACCURACY = {("single", 64): 0.95, ("single", 128): 0.90, ("ddp", 64): 0.96, ("ddp", 128): 0.91}


@dataclass(frozen=True)
class RunEnds:
    """Runs that ended in an unusual way, each by the name of its candidate and the number of its repeat, from 0."""

    diverged: Sequence[tuple[str, int]] = ()
    """Runs whose losses are not finite from the second window on."""
    unfinished: Sequence[tuple[str, int]] = ()
    """Runs that were interrupted after the third window, so they have no summary."""
    short: Sequence[tuple[str, int]] = ()
    """Runs that ended one step before the end of the first epoch."""

    def windows(self, run: tuple[str, int]) -> int:
        """Return the number of windows that a run trains."""
        return 2 if run in self.short else 3 if run in self.unfinished else len(LOSSES)


def candidates(
    sizes: Sequence[int], ranks: Sequence[int], *, per_rank: bool = False, lossy: Sequence[str] = ()
) -> Iterator[Candidate]:
    """Yield the points: `single` on one rank, `ddp` and the lossy strategies on more."""
    places = [(count, strategy) for count in ranks for strategy in (["single"] if count == 1 else ["ddp", *lossy])]
    for count, strategy in places:
        for size in sizes:
            batch = size * count if per_rank else size
            point = CandidatePoint(
                mode="batch", ranks=count, hosts=1, ranks_per_host=count, batch=batch, batch_per_rank=batch / count
            )
            role = "baseline" if count == 1 else "candidate"
            name, lossless = f"{strategy} on {count}, batch {batch}", strategy not in lossy
            yield Candidate(name, strategy, role=role, lossless=lossless, point=point)  # type: ignore[arg-type]


def write_batch_sizes(
    path: Path,
    sizes: Sequence[int] = (64, 128),
    ranks: Sequence[int] = (1, 2),
    *,
    repeats: int = 3,
    out_of_memory: Sequence[str] = (),
    killed: Sequence[str] = (),
    failures: Mapping[str, str] | None = None,
    trains: bool = True,
    per_rank: bool = False,
    interrupted: bool = False,
    design: Mapping[str, Any] | None = None,
    cores: float = 2.0,
    step_s: Mapping[Any, float] = STEP_S,
    test_accuracy: Mapping[tuple[str, int], float] = TEST_ACCURACY,
    lossy: Sequence[str] = (),
    ends: RunEnds | None = None,
    length: Mapping[str, Any] | None = None,
    lrs: Mapping[int, float] | None = None,
    is_tested: bool = False,
    noise_scale: float | None = None,
) -> Path:
    """Write an experiment as `paceline batch` does, on one host of two cores.

    `length` replaces the two epochs of a run in its settings, `lrs` has peak learning rates by batch, `is_tested` adds
    an evaluation after every window, and `noise_scale` is that of all runs. Times per step are by strategy and batch,
    or by these and the repeat.
    """
    points = list(candidates(sizes, ranks, per_rank=per_rank, lossy=lossy))
    config = RunConfig(**(length or ({"epochs": 2} if trains else {"steps": 20})))
    shared = {k: v for k, v in asdict(config).items() if k not in ("strategy", "batch", "batch_per_rank")}
    about = msgspec.structs.replace(PROVENANCE, command="paceline batch --sizes 64,128")
    plan = batch_design(
        sizes=list(sizes),
        ranks=max(ranks),
        repeats=repeats,
        max_repeats=repeats,
        reference=points[0].name,
        trains=trains,
        per_rank=per_rank,
        **(design or {}),
    )
    description = BatchDescription(kind="batch", candidates=points, config=shared, design=plan, provenance=about)
    events = EventWriter(ExperimentFolder.create(path, description))
    failed = dict.fromkeys(out_of_memory, "rank 0 ran out of memory: MemoryError.") | dict(failures or {})
    failed |= dict.fromkeys(killed, "rank 0 was killed by SIGKILL, probably because the host ran out of memory.")
    for name, message in failed.items():
        events.write(
            FailureEvent(
                candidate=name,
                stage="repeat 1",
                kind="RankError",
                message=message,
                hint="use less",
                out_of_memory="probably" if name in killed else name in out_of_memory,
            )
        )
    for repeat in range(repeats):
        for number, candidate in enumerate(points):
            if candidate.name not in failed:
                where = f"repeat-{repeat + 1}/{number + 1}"
                events.write(ScheduledEvent(candidate=candidate.name, repeat=repeat, folder=where))
                own = replace(config, strategy=candidate.strategy, seed=repeat)
                point, run = candidate.point, (candidate.name, repeat)
                assert point is not None
                write_run(
                    path / where,
                    candidate,
                    own,
                    cores,
                    step_s,
                    run,
                    ends or RunEnds(),
                    lrs,
                    test_accuracy.get((candidate.strategy, point.batch)),
                    is_tested=is_tested,
                    noise_scale=noise_scale,
                )
    events.write(InterruptedEvent() if interrupted else EndEvent())
    events.close()
    return path


def write_run(
    path: Path,
    candidate: Candidate,
    config: RunConfig,
    cores: float,
    step_times: Mapping[Any, float],
    run: tuple[str, int],
    ends: RunEnds,
    lrs: Mapping[int, float] | None,
    test_accuracy: float | None,
    *,
    is_tested: bool,
    noise_scale: float | None,
) -> None:
    """Write one run of two epochs."""
    point = candidate.point
    assert point is not None
    workers, batch = point.ranks, point.batch
    key = candidate.strategy, batch
    steps = SAMPLES // batch
    step_s = step_times.get((*key, run[1]), step_times.get(key, 0.001 * batch / workers))
    folder = RunFolder.create(path)
    own = topology(
        workers,
        strategy=candidate.strategy,
        batch=batch,
        batch_per_rank=[batch // workers],
        threads=2 if workers == 1 else 1,
        cores=cores,
        flop_per_sample=1e6,
        **({} if lrs is None else {"lr": lrs[batch], "recipe": recipe(scale_lr="sqrt")}),
    )
    folder.write_run(RunDescription(config=asdict(config), topology=own, provenance=PROVENANCE))
    events = EventWriter(folder)
    events.write(StartEvent(steps=2 * steps, steps_per_epoch=steps, dropped=0))
    done = 0
    noise = None if noise_scale is None else NoiseFigures(steps=2, trace=noise_scale, gradient_sq=1.0, cost_s=0.0)
    for number, (loss, accuracy) in list(enumerate(zip(LOSSES, ACCURACIES, strict=True)))[: ends.windows(run)]:
        epoch, length = number // 2, steps // 2 if number % 2 == 0 else steps - steps // 2
        length -= number if run in ends.short else 0
        done += length
        samples = batch * length
        events.write(
            LogEvent(
                epoch=epoch,
                step=done,
                wall_s=step_s * length * (1 if epoch else 2),
                losses=[None if run in ends.diverged and number else loss] * length,
                samples=samples,
                correct=round(accuracy * samples),
                noise=noise,
            )
        )
        if is_tested:
            test = EvaluationResult(loss=loss + 0.1, accuracy=accuracy - 0.05, samples=1000, available=1000)
            events.write(EvaluationEvent(test=test, step=done, epoch=epoch))
    if run not in ends.unfinished:
        events.write(EndEvent())
    events.close()
    for rank in range(workers):
        writer = StepWriter(folder, rank)
        phases = (0.1 * step_s, 0.3 * step_s, 0.5 * step_s, 0.1 * step_s)
        writer.write(
            StepRow(step, step // steps, batch // workers, step * step_s, *phases, 1.0, 3) for step in range(done)
        )
        writer.close()
    write_timelines(path, candidate, workers, 2 * steps, step_s)
    if run in ends.unfinished:
        return
    sent = [4000 if workers > 1 else 0] * workers
    planned = PlannedTraffic(sent_bytes=sent, received_bytes=sent, operations=1, algorithms=["ring"], buffer_bytes=0)
    test = EvaluationResult(loss=0.3, accuracy=test_accuracy, samples=1000, available=1000)
    folder.write_summary(
        summary(
            workers,
            strategy=candidate.strategy,
            steps=2 * steps,
            step_s=step_s,
            ranks=[rank_summary(rank, cpu_share=1.5 if workers == 1 else 0.95) for rank in range(workers)],
            traffic=planned,
            test=test if config.steps is None and test_accuracy is not None else None,
        )
    )
    folder.mark_finished()


def read_batch_sizes(path: Path) -> BatchSizes:
    """Read the results of an experiment over batch sizes."""
    return batch_sizes(collect_records([read_experiment(path)]))

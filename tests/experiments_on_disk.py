"""Write experiments to disk without training, through the same writers as real experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.analysis.comparison import Comparison, compare
from paceline.analysis.record_set import collect_records
from paceline.config import RunConfig
from paceline.plans import Plan
from paceline.plans.operations import all_reduce
from paceline.records import (
    EventWriter,
    Provenance,
    RunDescription,
    RunFolder,
    StepRow,
    StepWriter,
    Summary,
    Topology,
    read_run,
)
from paceline.records.decoder import read_model
from paceline.records.events import (
    ConfigEvent,
    EndEvent,
    EvaluationEvent,
    FailureEvent,
    InterruptedEvent,
    LogEvent,
    ParityEvent,
    ScheduledEvent,
    StartEvent,
)
from paceline.records.experiment.design import Candidate, CompareDescription
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import SUMMARY_FILE, ResourceRow
from paceline.records.summary import EvaluationResult, InterfaceTraffic, PlannedTraffic, SocketLink, SocketTraffic
from paceline.records.timeline import NO_PEER, NOT_MEASURED, Purpose, RowKind, TimelineWriter
from paceline.records.writer import ResourceWriter
from run_models import PROVENANCE, compare_design, rank_summary, summary, topology

CLASSIC = (
    Candidate("single", "single", role="baseline"),
    Candidate("none", "none", role="bound", lossless=False),
    Candidate("allreduce", "allreduce"),
    Candidate("ddp", "ddp"),
)
WINDOW = 4
SAMPLES_PER_RANK = 16

Losses = Callable[[Candidate, int, int], float]
"""Function (candidate, repeat, step) -> loss."""


def falling(candidate: Candidate, repeat: int, step: int) -> float:
    """Return a falling loss, equal for all lossless candidates except the baseline, which differs by rounding."""
    off = {"baseline": 1e-7, "bound": 0.1}.get(candidate.role, 0.0)
    return (2.3 + 0.01 * repeat) * math.exp(-step / 50) * (1 + off)


def write_experiment(
    path: Path,
    candidates: Sequence[Candidate] = CLASSIC,
    *,
    repeats: int = 2,
    ranks: int = 2,
    steps: int = 12,
    step_s: Mapping[str, float] | None = None,
    losses: Losses = falling,
    accuracy: float | None = 0.5,
    failures: Mapping[str, str] | None = None,
    skipped: Mapping[str, Collection[int]] | None = None,
    interrupted: bool = False,
    proof: bool = True,
    events: bool = False,
    settings: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    evaluations: Sequence[int] = (),
    rate: Callable[[int], float] | None = None,
) -> Path:
    """Write an experiment as `paceline compare` does. Candidates in `failures` have no runs; the others complete all.

    `skipped` has steps that were skipped, by candidate. With `events`, runs also have timelines (see `_phases`) and
    socket byte counts. `evaluations` are steps at which they are tested, and `rate` is the learning rate of a step.
    """
    config = RunConfig(**{"steps": steps, **(settings or {})})
    eligible = [candidate.name for candidate in candidates if candidate.role == "candidate"]
    design = compare_design(
        ranks=ranks,
        ranks_per_host=ranks,
        repeats=repeats,
        max_repeats=repeats,
        reference=eligible[-1] if eligible else candidates[0].name,
        proof=proof,
    )
    shared = {key: value for key, value in asdict(config).items() if key != "strategy"}
    about = msgspec.structs.replace(PROVENANCE, **(provenance or {}))
    description = CompareDescription(
        kind="compare", candidates=list(candidates), config=shared, design=design, provenance=about
    )
    folder = ExperimentFolder.create(path, description)
    event_writer = EventWriter(folder)
    for candidate in candidates if proof else ():
        event_writer.write(_parity(candidate, ranks))
    for name, message in (failures or {}).items():
        failure = FailureEvent(candidate=name, stage="proof", kind="RankError", message=message, hint="try again")
        event_writer.write(failure)
    measured = [candidate for candidate in candidates if candidate.name not in (failures or {})]
    for repeat in range(repeats):
        for place, candidate in enumerate(measured):
            where = f"repeat-{repeat + 1}/{place + 1}"
            event_writer.write(ScheduledEvent(candidate=candidate.name, repeat=repeat, folder=where))
            time_s = (step_s or {}).get(candidate.name, 0.01 * (place + 1)) * (1 + 0.01 * ((repeat + place) % 3))
            workers = 1 if candidate.role == "baseline" else ranks
            run_config = replace(config, strategy=candidate.strategy, seed=repeat, **candidate.settings)
            curve = [losses(candidate, repeat, step) for step in range(steps)]
            write_run(
                *(path / where, candidate, run_config, workers, curve, time_s, accuracy, about),
                skipped=(skipped or {}).get(candidate.name, ()),
                evaluations=evaluations,
                rate=rate,
            )
            if events:
                write_timelines(path / where, candidate, workers, steps, time_s)
                write_counts(path / where, candidate, workers, steps)
    event_writer.write(InterruptedEvent() if interrupted else EndEvent())
    event_writer.close()
    return path


def write_run(
    path: Path,
    candidate: Candidate,
    config: RunConfig,
    workers: int,
    losses: Sequence[float],
    step_s: float,
    accuracy: float | None,
    provenance: Provenance,
    place: Mapping[str, Any] | None = None,
    steps_per_epoch: int = 5,
    skipped: Collection[int] = (),
    evaluations: Sequence[int] = (),
    rate: Callable[[int], float] | None = None,
) -> None:
    """Write one run: every step takes the same time, except that the first takes ten times as long.

    `place` has changes to its topology.
    """
    folder = RunFolder.create(path)
    own = msgspec.structs.replace(_topology(candidate, config, workers), **(place or {}))
    folder.write_run(RunDescription(config=asdict(config), topology=own, provenance=provenance))
    for rank in range(workers):
        writer = StepWriter(folder, rank)
        writer.write(_row(step, loss, step_s, rank) for step, loss in enumerate(losses))
        writer.close()
    events = EventWriter(folder)
    events.write(ConfigEvent(**msgspec.structs.asdict(own)))
    events.write(StartEvent(steps=len(losses), steps_per_epoch=steps_per_epoch, dropped=0))
    for start in range(0, len(losses), WINDOW):
        window = list(losses[start : start + WINDOW])
        samples = (own.batch or 0) * len(window)
        done, wall_s = start + len(window), step_s * len(window)
        without = [step for step in range(start, done) if step in skipped]
        rates = None if rate is None else [rate(step) for step in range(start, done)]
        log = LogEvent(epoch=0, step=done, wall_s=wall_s, losses=window, samples=samples, correct=0, skipped=without)
        events.write(msgspec.structs.replace(log, lrs=rates, lr=None if rates is None else rates[-1]))
        for step in (step for step in evaluations if start < step <= done):
            events.write(EvaluationEvent(step=step, epoch=0, test=evaluated(step, losses, accuracy)))
    events.write(EndEvent())
    events.close()
    written = _summary(candidate, workers, losses, accuracy)
    folder.write_summary(msgspec.structs.replace(written, skipped_steps=len(skipped)))
    folder.mark_finished()


def evaluated(step: int, losses: Sequence[float], accuracy: float | None) -> EvaluationResult:
    """Return a result after some steps: the loss of the last of them, and an accuracy that rises to the given one."""
    risen = None if accuracy is None else accuracy * step / len(losses)
    return EvaluationResult(loss=losses[step - 1], accuracy=risen, samples=360, available=360)


def write_timelines(path: Path, candidate: Candidate, workers: int, steps: int, step_s: float) -> None:
    """Write the timelines of all ranks for a run of `write_run`."""
    for rank in range(workers):
        writer = TimelineWriter(path, rank)
        start_s = 0.0
        for step in range(steps):
            length_s = step_s * (10 if step == 0 else 1)
            writer.write([(step, *row) for row in _phases(candidate, rank / workers, start_s, length_s)])
            start_s += length_s
        writer.close()


def write_counts(path: Path, candidate: Candidate, workers: int, steps: int, *, off: float = 0.0) -> None:
    """Add the planned links of an all-reduce and equal socket counts to a summary; `off` scales the counts."""
    sends = candidate.role == "candidate" and workers > 1
    links = Plan((all_reduce(1000, 4, workers, 0.0),)).links() if sends else []
    sockets = [
        SocketLink(source=link.source, target=link.target, sent_bytes=size, received_bytes=size)
        for link in links
        if (size := round((link.payload_bytes + link.framing_bytes) * steps * (1 + off)))
    ]
    host = InterfaceTraffic(name="lo", ranks=list(range(workers)), sent_bytes=10**6, received_bytes=10**6)
    written = read_model(path / SUMMARY_FILE, Summary, "summary")
    assert written.traffic is not None
    traffic = msgspec.structs.replace(written.traffic, links=links)
    counted = SocketTraffic(steps=steps, links=sockets, interfaces=[host])
    RunFolder(path).write_summary(msgspec.structs.replace(written, traffic=traffic, sockets=counted))


def write_load(path: Path, load: float, share: float = 0.3) -> Path:
    """Add samples of the resources to all runs of `write_experiment`: other programs use `load` cores.

    Each rank uses a share of a core. The samples cover two seconds.
    """
    for summary_file in path.glob(f"*/*/{SUMMARY_FILE}"):
        run = read_run(summary_file.parent)
        for rank in range(run.topology.workers):
            writer = ResourceWriter(RunFolder(summary_file.parent), rank)
            for number in range(5):
                busy = (load + share * run.topology.workers) / run.topology.cores if rank == 0 and number else None
                time_s = number / 2
                writer.write([ResourceRow(time_s, share * time_s, 10**8, 4, 0.0, None, None, busy, None, None)])
            writer.close()
    return path


def _phases(candidate: Candidate, lateness: float, start_s: float, length_s: float) -> list[tuple[Any, ...]]:
    """Return one step on one rank: 2% data, 40% forward, 50% backward, 8% optimiser.

    For a candidate, backward consists of compute (30% of the step) and exposed communication (20%). Under `ddp` the
    all-reduce starts 10% of the step before the end of compute, otherwise after it. Higher ranks are later, by up to
    4%.
    """

    def row(kind: RowKind, start: float, end: float, wait_start: float = NOT_MEASURED) -> tuple[Any, ...]:
        sent = (Purpose.GRADIENTS, NO_PEER, 4000) if kind.is_operation else (Purpose.NOTHING, NO_PEER, 0)
        cpu_s = NOT_MEASURED if kind.is_operation or kind is RowKind.STEP else 0.9 * (end - start) * length_s
        times = (start_s + fraction * length_s for fraction in (start, end, wait_start))
        return (kind, *sent, *times, cpu_s)

    compute_end = 0.92 if candidate.role != "candidate" else 0.72 + 0.04 * lateness
    rows = [row(RowKind.STEP, 0, 1), row(RowKind.DATA, 0, 0.02), row(RowKind.FORWARD, 0.02, 0.42)]
    rows += [row(RowKind.BACKWARD, 0.42, compute_end), row(RowKind.OPTIMISER, 0.92, 1)]
    if candidate.role == "candidate":
        begun = compute_end - 0.1 if candidate.strategy == "ddp" else compute_end
        rows.append(row(RowKind.ALL_REDUCE, begun, 0.92, compute_end))
    return rows


def read_comparison(path: Path) -> Comparison:
    """Read and compare an experiment."""
    return compare(collect_records([read_experiment(path)]))


def _parity(candidate: Candidate, ranks: int) -> ParityEvent:
    error = 3e-8 if candidate.lossless else 0.9
    return ParityEvent(candidate.strategy, ranks, error, 1.0, 1e-5, candidate.lossless, 3, candidate=candidate.name)


def _row(step: int, loss: float, step_s: float, rank: int) -> StepRow:
    own = step_s * (10 if step == 0 else 1) * (1 + 0.001 * rank)
    phases = (0.02 * own, 0.4 * own, 0.5 * own, 0.08 * own)
    return StepRow(step, step // 5, SAMPLES_PER_RANK, step * step_s, *phases, loss, 3)


def _topology(candidate: Candidate, config: RunConfig, workers: int) -> Topology:
    return topology(
        workers,
        workload=config.workload if ":" in config.workload else f"{config.workload} on {config.data}",
        strategy=candidate.strategy,
        lossless=candidate.lossless,
        exchanges=candidate.role != "bound",
        sends="overlapped" if candidate.strategy == "ddp" else "singly",
        batch=SAMPLES_PER_RANK * workers,
        batch_per_rank=[SAMPLES_PER_RANK],
        lr=config.lr,
        log_every=config.log_every,
    )


def _summary(candidate: Candidate, workers: int, losses: Sequence[float], accuracy: float | None) -> Summary:
    sent = 0 if candidate.role != "candidate" else 4000
    average = sum(losses) / len(losses)
    test = EvaluationResult(loss=average, accuracy=accuracy, samples=360, available=360)
    planned = [sent] * workers
    return summary(
        workers,
        strategy=candidate.strategy,
        steps=len(losses),
        average_loss=average,
        ranks=[rank_summary(rank, steps=len(losses)) for rank in range(workers)],
        traffic=PlannedTraffic(
            sent_bytes=planned, received_bytes=planned, operations=1, algorithms=["ring"], buffer_bytes=0
        ),
        test=None if accuracy is None else test,
    )

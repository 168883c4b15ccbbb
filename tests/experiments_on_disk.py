"""Write experiments to disk without training, through the same writers as real experiments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.analysis.comparison import Comparison, compare
from paceline.analysis.record_set import collect_records
from paceline.config import RunConfig
from paceline.plans import Plan
from paceline.plans.operations import all_reduce
from paceline.records import EventWriter, RunFolder, StepRow, StepWriter
from paceline.records.experiment import Candidate, ExperimentFolder, read_experiment
from paceline.records.schema import SUMMARY_FILE
from paceline.records.timeline import NO_PEER, NOT_MEASURED, Purpose, RowKind, TimelineWriter

CLASSIC = (
    Candidate("single", "single", role="baseline"),
    Candidate("none", "none", role="bound", lossless=False),
    Candidate("allreduce", "allreduce"),
    Candidate("ddp", "ddp"),
)
PROVENANCE = {
    "time": "2026-01-02T03:04:05+0000",
    "command": "paceline compare --ranks 2",
    "host": "here",
    "system": "Linux",
    "cpu": "a processor",
    "cpu_count": 2,
    "memory_bytes": 8_000_000_000,
    "python": "3.11.0",
    "versions": {"paceline": "0.1.0", "torch": "2.13.0"},
    "commit": "0123456789abcdef",
}
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
    interrupted: bool = False,
    proof: bool = True,
    events: bool = False,
    settings: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write an experiment as `paceline compare` does. Candidates in `failures` have no runs; the others complete all.

    With `events`, runs also have timelines (see `_phases`) and socket byte counts.
    """
    config = RunConfig(**{"steps": steps, **(settings or {})})
    eligible = [candidate.name for candidate in candidates if candidate.role == "candidate"]
    design = {
        "ranks": ranks,
        "repeats": repeats,
        "max_repeats": repeats,
        "interim_analyses": 1,
        "reference": eligible[-1] if eligible else candidates[0].name,
        "proof": proof,
        "estimate_s": None,
    }
    shared = {key: value for key, value in asdict(config).items() if key != "strategy"}
    about = PROVENANCE | dict(provenance or {})
    folder = ExperimentFolder.create(
        path, kind="compare", candidates=candidates, config=shared, design=design, provenance=about
    )
    event_writer = EventWriter(folder)
    for candidate in candidates if proof else ():
        event_writer.write("parity", candidate=candidate.name, **_parity(candidate, ranks))
    for name, message in (failures or {}).items():
        event_writer.write(
            "failure", candidate=name, stage="proof", kind="RankError", message=message, hint="try again"
        )
    measured = [candidate for candidate in candidates if candidate.name not in (failures or {})]
    for repeat in range(repeats):
        for place, candidate in enumerate(measured):
            where = f"repeat-{repeat + 1}/{place + 1}"
            event_writer.write("run", candidate=candidate.name, repeat=repeat, folder=where)
            time_s = (step_s or {}).get(candidate.name, 0.01 * (place + 1)) * (1 + 0.01 * ((repeat + place) % 3))
            workers = 1 if candidate.role == "baseline" else ranks
            run_config = replace(config, strategy=candidate.strategy, seed=repeat, **candidate.settings)
            curve = [losses(candidate, repeat, step) for step in range(steps)]
            write_run(path / where, candidate, run_config, workers, curve, time_s, accuracy, about)
            if events:
                write_timelines(path / where, candidate, workers, steps, time_s)
                write_counts(path / where, candidate, workers, steps)
    event_writer.write("interrupted" if interrupted else "end")
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
    provenance: Mapping[str, Any],
    place: Mapping[str, Any] | None = None,
    steps_per_epoch: int = 5,
) -> None:
    """Write one run: every step takes the same time, except that the first takes ten times as long.

    `place` has changes to its topology.
    """
    folder = RunFolder.create(path)
    topology = _topology(candidate, config, workers) | dict(place or {})
    folder.write_run(config=asdict(config), topology=topology, provenance=dict(provenance))
    for rank in range(workers):
        writer = StepWriter(folder, rank)
        writer.write(_row(step, loss, step_s, rank) for step, loss in enumerate(losses))
        writer.close()
    events = EventWriter(folder)
    events.write("config", **topology)
    events.write("start", steps=len(losses), steps_per_epoch=steps_per_epoch, dropped=0)
    for start in range(0, len(losses), WINDOW):
        window = list(losses[start : start + WINDOW])
        samples = topology["batch"] * len(window)
        wall_s = step_s * len(window)
        events.write("log", epoch=0, step=start + len(window), wall_s=wall_s, losses=window, samples=samples, correct=0)
    events.write("end")
    events.close()
    folder.write_summary(_summary(candidate, workers, losses, accuracy))
    folder.mark_finished()


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
        {
            "source": link.source,
            "target": link.target,
            "sent_bytes": size,
            "received_bytes": size,
            "retransmitted_bytes": 0,
        }
        for link in links
        if (size := round((link.payload_bytes + link.framing_bytes) * steps * (1 + off)))
    ]
    host = {"name": "lo", "ranks": list(range(workers)), "sent_bytes": 10**6, "received_bytes": 10**6}
    summary = json.loads((path / SUMMARY_FILE).read_text())
    summary["traffic"]["links"] = [asdict(link) for link in links]
    summary["sockets"] = {"steps": steps, "links": sockets, "interfaces": [host]}
    RunFolder(path).write_summary(summary)


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


def _parity(candidate: Candidate, ranks: int) -> dict[str, Any]:
    error = 3e-8 if candidate.lossless else 0.9
    values = {"strategy": candidate.strategy, "ranks": ranks, "error": error, "factor": 1.0}
    return values | {"tolerance": 1e-5, "lossless": candidate.lossless, "steps": 3}


def _row(step: int, loss: float, step_s: float, rank: int) -> StepRow:
    own = step_s * (10 if step == 0 else 1) * (1 + 0.001 * rank)
    phases = (0.02 * own, 0.4 * own, 0.5 * own, 0.08 * own)
    return StepRow(step, step // 5, SAMPLES_PER_RANK, step * step_s, *phases, loss, 3)


def _topology(candidate: Candidate, config: RunConfig, workers: int) -> dict[str, Any]:
    name = config.workload if ":" in config.workload else f"{config.workload} on {config.data}"
    return {
        "workload": name,
        "strategy": candidate.strategy,
        "lossless": candidate.lossless,
        "exchanges": candidate.role != "bound",
        "world_size": workers,
        "workers": workers,
        "ranks_per_host": workers,
        "batch": SAMPLES_PER_RANK * workers,
        "batch_per_rank": [SAMPLES_PER_RANK],
        "device": "cpu",
        "backend": "gloo",
        "interface": "lo",
        "threads": 1,
        "cores": float(workers),
        "parameters": 1000,
        "gradient_bytes": 4000,
        "batch_norm_layers": 0,
        "classes": 10,
        "user_optimizer": False,
        "lr": config.lr,
        "log_every": config.log_every,
    }


def _summary(candidate: Candidate, workers: int, losses: Sequence[float], accuracy: float | None) -> dict[str, Any]:
    sent = 0 if candidate.role != "candidate" else 4000
    average = sum(losses) / len(losses)
    test = {"loss": average, "accuracy": accuracy, "samples": 360, "available": 360}
    return {
        "strategy": candidate.strategy,
        "steps": len(losses),
        "average_loss": average,
        "ranks": [{"rank": rank, "peak_bytes": 4e8 + rank} for rank in range(workers)],
        "traffic": {"sent_bytes": [sent] * workers, "received_bytes": [sent] * workers, "operations": 1},
    } | ({} if accuracy is None else {"test": test})

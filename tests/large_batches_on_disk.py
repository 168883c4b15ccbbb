"""Write experiments with large batches to disk without training, with numbers that can be checked by hand.

The training data has 640 samples; a run trains 4 epochs of one window each, and is tested after each. The noise scale
of every run is 288, so a batch of 320 needs (288 + 320) ÷ (288 + 32) = 1.9 times the epochs of the reference batch 32.
The seeds shift all accuracies of a repeat by the same amount, so that differences between candidates have no spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.analysis.large_batch.results import LargeBatches, large_batches
from paceline.analysis.record_set import collect_records
from paceline.config import RunConfig
from paceline.config.large_batch import variant_name
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
from paceline.records.experiment.design import Candidate, LargeBatchDescription, LargeBatchVariant
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import read_experiment
from paceline.records.schema import LARGE_BATCH_KIND, StepRow
from paceline.records.summary import EvaluationResult
from paceline.records.writer import StepWriter
from run_models import PROVENANCE, large_batch_design, summary, topology

SAMPLES, EPOCHS = 640, 4
REFERENCE, LARGE = 32, 320
NOISE_SCALE = 288.0
SHIFTS = (0.0, 0.01, -0.01, 0.005, -0.005)
"""Shift of all accuracies of a repeat."""
ACCURACIES: dict[tuple[str, ...], tuple[float, ...]] = {
    ("reference",): (0.5, 0.7, 0.85, 0.9),
    (): (0.2, 0.4, 0.5, 0.6),
    ("linear",): (0.3, 0.5, 0.7, 0.75),
    ("warmup",): (0.2, 0.4, 0.5, 0.6),
    ("linear", "warmup"): (0.4, 0.6, 0.8, 0.89),
}
"""Test accuracies after each epoch, by the remedies of a candidate."""


def candidate(batch: int, remedies: Sequence[str] | None) -> Candidate:
    """Return a candidate; `remedies` is None for the reference."""
    name = f"{batch} {'reference' if remedies is None else variant_name(remedies)}"
    variant = LargeBatchVariant(batch=batch, remedies=list(remedies or ()))
    return Candidate(name, "ddp", {"batch": batch}, variant=variant)


def write_large_batches(
    path: Path,
    *,
    sizes: Sequence[int] = (LARGE,),
    repeats: int = 3,
    accuracies: Mapping[tuple[str, ...], tuple[float, ...]] | None = None,
    diverged: Sequence[tuple[str, int]] = (),
    failed: Sequence[str] = (),
    measured: int | None = None,
    missing: Sequence[str] = (),
    noise_scale: float | None = NOISE_SCALE,
    interrupted: bool = False,
    design: Mapping[str, Any] | None = None,
    spread: float = 0.0,
    rates: Mapping[str, float] | None = None,
    tries_remedies: bool = True,
) -> Path:
    """Write an experiment as `paceline large-batch` does.

    `accuracies` replaces some of `ACCURACIES`; `diverged` has runs whose losses are not finite from the second epoch
    on, by the name of the candidate and the number of the repeat from 0; `failed` has candidates without any run.
    `measured` is the number of repeats that have runs, and `missing` has candidates that have not been trained yet.
    `spread` is the difference of the accuracies of a large batch from one repeat to the next; `rates` has the learning
    rates of some candidates.
    """
    own = ACCURACIES | (accuracies or {})
    remedies = [remedies for remedies in own if remedies != ("reference",) and (tries_remedies or not remedies)]
    candidates = [candidate(REFERENCE, None), *[candidate(size, one) for size in sizes for one in remedies]]
    config = RunConfig(epochs=EPOCHS, eval_every="epoch", noise_scale="auto")
    shared = {key: value for key, value in asdict(config).items() if key != "batch"}
    about = msgspec.structs.replace(PROVENANCE, command="paceline large-batch")
    plan = large_batch_design(
        repeats=repeats, max_repeats=repeats, reference=candidates[0].name, sizes=list(sizes), **(design or {})
    )
    description = LargeBatchDescription(
        kind=LARGE_BATCH_KIND, candidates=candidates, config=shared, design=plan, provenance=about
    )
    folder = ExperimentFolder.create(path, description)
    events = EventWriter(folder)
    for name in failed:
        events.write(
            FailureEvent(candidate=name, stage="repeat 1", kind="RankError", message="rank 1 failed.", hint="look")
        )
    for repeat in range(repeats if measured is None else measured):
        for number, one in enumerate(candidates):
            if one.name in (*failed, *missing):
                continue
            assert one.variant is not None
            where = f"repeat-{repeat + 1}/{number + 1}"
            events.write(ScheduledEvent(candidate=one.name, repeat=repeat, folder=where))
            key = ("reference",) if number == 0 else tuple(one.variant.remedies)
            is_diverged = (one.name, repeat) in diverged
            _write_run(
                path / where,
                replace(config, seed=repeat, batch=one.variant.batch),
                [accuracy + SHIFTS[repeat] + (spread * (repeat - 1) if number else 0) for accuracy in own[key]],
                noise_scale,
                (rates or {}).get(one.name, 0.1),
                is_diverged=is_diverged,
            )
            if is_diverged:
                events.write(
                    FailureEvent(
                        candidate=one.name,
                        stage=f"repeat {repeat + 1}",
                        kind="DivergenceError",
                        message="the loss is not finite.",
                        hint="",
                    )
                )
    events.write(InterruptedEvent() if interrupted else EndEvent())
    events.close()
    folder.close()
    return path


def _write_run(
    path: Path,
    config: RunConfig,
    accuracies: Sequence[float],
    noise_scale: float | None,
    lr: float,
    *,
    is_diverged: bool,
) -> None:
    folder = RunFolder.create(path)
    assert config.batch is not None
    own = topology(batch=config.batch, batch_per_rank=[config.batch // 2], lr=lr)
    folder.write_run(RunDescription(config=asdict(config), topology=own, provenance=PROVENANCE))
    steps = SAMPLES // config.batch
    events = EventWriter(folder)
    events.write(StartEvent(steps=EPOCHS * steps, steps_per_epoch=steps, dropped=0))
    noise = None if noise_scale is None else NoiseFigures(steps=2, trace=2 * noise_scale, gradient_sq=2.0, cost_s=0.0)
    for epoch, accuracy in enumerate(accuracies):
        done = steps * (epoch + 1)
        events.write(
            LogEvent(
                epoch=epoch,
                step=done,
                wall_s=0.01 * steps,
                losses=[None if is_diverged and epoch else 1.0 - accuracy] * steps,
                samples=SAMPLES,
                correct=round(SAMPLES * accuracy),
                lr=lr,
                noise=noise,
            )
        )
        test = EvaluationResult(loss=1.1 - accuracy, accuracy=accuracy, samples=1000, available=1000)
        events.write(EvaluationEvent(test=test, step=done, epoch=epoch))
    if not is_diverged:
        events.write(EndEvent())
    events.close()
    for rank in range(2):
        writer = StepWriter(folder, rank)
        phases = (0.001, 0.003, 0.005, 0.001)
        writer.write(
            StepRow(step, step // steps, config.batch // 2, step * 0.01, *phases, 1.0, 3)
            for step in range(EPOCHS * steps)
        )
        writer.close()
    if not is_diverged:
        folder.write_summary(summary(steps=EPOCHS * steps, test=test, average_loss=1.0 - accuracies[-1]))
        folder.mark_finished()


def read_large_batches(path: Path) -> LargeBatches:
    """Read the results of an experiment with large batches."""
    return large_batches(collect_records([read_experiment(path)]))

"""Time that one run needed to reach a test accuracy, by training time and by total time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.analysis.curves import EvaluatedPoint, validation_curve
from paceline.analysis.divergence import divergence_of
from paceline.records import RunRecord
from paceline.records.events import EvaluationEvent, ResumedEvent, StartEvent

Outcome = Literal["reached", "missed", "diverged", "unfinished"]
"""End of a run: `missed` at its full length, `diverged` before it; an `unfinished` one was interrupted."""


@dataclass(frozen=True)
class RaceRun:
    """One run of a race. A time is None if the run did not reach the target, or if it was not recorded."""

    number: int
    """Number of the run, from 1."""
    seed: int
    path: Path
    outcome: Outcome
    train_s: float | None
    """Training time until the end of the step whose evaluation reached the target: without evaluations."""
    total_s: float | None
    """Time from the launch of the ranks to the end of that evaluation."""
    compile_s: float | None
    """Part of the start-up in which the model was compiled or its kernels were prepared; None if nothing was."""
    start_up_s: float | None
    """Time from the launch of the ranks to the first step, compiling included."""
    start_up_parts_s: dict[str, float]
    """Time of each part of the start-up, on rank 0; empty if they were not recorded."""
    evaluation_s: float | None
    """Time of all evaluations until then; of a run that missed, of all."""
    evaluations: int
    """Number of these evaluations."""
    step: int | None
    """Steps done at the evaluation that reached the target; of a run that missed, at its best evaluation."""
    epochs: float | None
    """Epochs done then, with fractions; None if the length of an epoch is unknown."""
    accuracy: float | None
    """Test accuracy at that evaluation."""
    loss: float | None
    """Test loss at that evaluation."""
    trained_s: float
    """Training time of the whole run."""
    curve: list[EvaluatedPoint]
    """All evaluations of the run."""

    @property
    def is_counted(self) -> bool:
        """Whether the run counts: it reached the target, or had its whole chance to."""
        return self.outcome != "unfinished"

    @property
    def with_compile_s(self) -> float | None:
        """Training time with the time of compiling added; None if nothing was compiled."""
        return None if self.train_s is None or self.compile_s is None else self.train_s + self.compile_s


def race_run(run: RunRecord, number: int, target: float) -> RaceRun:
    """Return the result of one run."""
    curve = validation_curve(run)
    reached = reached_point(curve, target)
    shown = reached or max((p for p in curve if p.accuracy is not None), key=lambda p: p.accuracy or 0, default=None)
    start = next(iter(run.events_of(StartEvent)), None)
    start_up_s = None if start is None or run.events_of(ResumedEvent) else start.start_up_s
    end_s = _end_s(run, None if reached is None else reached.step)
    spans = [mark.end_s - mark.start_s for mark in run.marks.get(0, []) if _is_evaluation(mark.kind, mark.end_s, end_s)]
    total_s = None
    if reached is not None and start is not None and start_up_s is not None and end_s is not None:
        total_s = start_up_s + end_s - start.time_s
    return RaceRun(
        number=number,
        seed=int(run.config.get("seed") or 0),
        path=run.path,
        outcome=_outcome(run, reached),
        train_s=None if reached is None else reached.train_s,
        total_s=total_s,
        compile_s=None if start is None else start.compile_s,
        start_up_s=start_up_s,
        start_up_parts_s={} if start is None or start_up_s is None else start.start_up_parts_s or {},
        evaluation_s=sum(spans) if spans else None,
        evaluations=sum(reached is None or point.step <= reached.step for point in curve),
        step=None if shown is None else shown.step,
        epochs=None if shown is None else shown.epochs,
        accuracy=None if shown is None else shown.accuracy,
        loss=None if shown is None else shown.loss,
        trained_s=max((point.train_s for point in curve), default=0.0),
        curve=curve,
    )


def reached_point(curve: list[EvaluatedPoint], target: float) -> EvaluatedPoint | None:
    """Return the first evaluation that reached the target; None if none did."""
    return next((point for point in curve if point.accuracy is not None and point.accuracy >= target), None)


def _outcome(run: RunRecord, reached: EvaluatedPoint | None) -> Outcome:
    if reached is not None:
        return "reached"
    if divergence_of(run) is not None:
        return "diverged"
    return "missed" if run.finished else "unfinished"


def _end_s(run: RunRecord, step: int | None) -> float | None:
    """Return the time of the evaluation at a step, on the clock of the record; None without a step."""
    return next((event.time_s for event in run.events_of(EvaluationEvent) if event.step == step), None)


def _is_evaluation(kind: str, ended_s: float, end_s: float | None) -> bool:
    """Return whether a mark is an evaluation that counts: all of them, or those up to the target."""
    return kind == "evaluation" and (end_s is None or ended_s <= end_s)

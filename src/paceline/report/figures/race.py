"""Figures of a run of a race: its times until the target, and the evaluation that reached it."""

from __future__ import annotations

from typing import Any

from paceline.analysis.race.runs import RaceRun
from paceline.formatting import LOSS, RACE_ACCURACY, SECONDS, TENTHS, WHOLE
from paceline.records.writer import json_safe
from paceline.report.figures.figure import Figure, InTerminal, csv_values, json_values

RACE_FIGURES: tuple[Figure[RaceRun], ...] = (
    Figure(
        key="train_s",
        heading="Training time",
        format=SECONDS,
        definition="Time of the race: from the first step to the end of the step whose evaluation reached the target. "
        "It is the wall time of the steps on the slowest rank; evaluations, and what Paceline records between groups "
        "of steps, are left out. A run that missed the target has none.",
        terminal=InTerminal("training", 10),
        is_always_shown=True,
    ),
    Figure(
        key="with_compile_s",
        heading="Training + compiling",
        format=SECONDS,
        definition="Training time plus the time of compiling the model or preparing its kernels before the first step.",
        terminal=InTerminal("+ compiling", 9),
    ),
    Figure(
        key="total_s",
        heading="Total time",
        format=SECONDS,
        definition="Time from the launch of the ranks to the end of the evaluation that reached the target: starting "
        "processes, importing torch, reading data, compiling, training and evaluations.",
        terminal=InTerminal("total", 9),
    ),
    Figure(
        key="start_up_s",
        heading="Start-up",
        format=SECONDS,
        definition="Part of the total time before the first step, compiling included.",
        terminal=InTerminal("start-up", 5),
    ),
    Figure(
        key="compile_s",
        heading="Compiling",
        format=SECONDS,
        definition="Part of the start-up in which the model was compiled or its kernels were prepared.",
    ),
    Figure(
        key="evaluation_s",
        heading="Evaluations",
        format=SECONDS,
        definition="Time of all evaluations until the target was reached; of a run that missed it, of all.",
        terminal=InTerminal("evaluations", 4),
    ),
    Figure(
        key="evaluations",
        heading="Number of evaluations",
        format=WHOLE,
        definition="Evaluations until the target was reached; of a run that missed it, all.",
    ),
    Figure(
        key="accuracy",
        heading="Test accuracy",
        format=RACE_ACCURACY,
        definition="Test accuracy of the evaluation that reached the target; of a run that missed it, the best.",
        terminal=InTerminal("accuracy", 8),
    ),
    Figure(
        key="loss",
        heading="Test loss",
        format=LOSS,
        definition="Test loss of that evaluation.",
        terminal=InTerminal("test loss", 3),
    ),
    Figure(
        key="step",
        heading="Steps",
        format=WHOLE,
        definition="Steps done at that evaluation.",
        terminal=InTerminal("steps", 7),
    ),
    Figure(
        key="epochs",
        heading="Epochs",
        format=TENTHS,
        definition="Epochs done at that evaluation, with fractions.",
        terminal=InTerminal("epochs", 6),
    ),
    Figure(
        key="trained_s",
        heading="Trained",
        format=SECONDS,
        definition="Training time of the whole run, also of one that missed the target.",
    ),
)
"""Figures of a run of a race, in the order of its table."""


def race_run_json(run: RaceRun) -> dict[str, Any]:
    """Return a run as JSON data, with its evaluations."""
    about = {"run": run.number, "seed": run.seed, "outcome": run.outcome, "record": str(run.path)}
    points = [
        {"step": p.step, "epochs": p.epochs, "train_s": p.train_s, "loss": p.loss, "accuracy": p.accuracy}
        for p in run.curve
    ]
    more = {"start_up_parts_s": run.start_up_parts_s, "curve": points}
    found: dict[str, Any] = json_safe(about | json_values(RACE_FIGURES, run) | more)
    return found


def race_run_csv(run: RaceRun) -> dict[str, Any]:
    """Return a run as a row of a CSV file."""
    return {"run": run.number, "seed": run.seed, "outcome": run.outcome} | csv_values(RACE_FIGURES, run)

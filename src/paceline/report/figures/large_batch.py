"""Figures of a candidate of an experiment with large batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.analysis.large_batch.results import LargeBatchRow
from paceline.config.large_batch import REMEDIES
from paceline.formatting import ACCURACY, FACTOR, POINTS, WHOLE
from paceline.records.writer import json_safe
from paceline.report.definitions import Definition
from paceline.report.figures.batch import TRAINING_FIGURES
from paceline.report.figures.candidates import candidate_json, diverged_places
from paceline.report.figures.figure import Figure, InTerminal, csv_values, json_values
from paceline.report.figures.points import figure_of_candidate

_OF_BATCHES = {figure.key: figure for figure in TRAINING_FIGURES}


def _training_figure(key: str, heading: str, priority: int) -> Figure[Any]:
    """Return a figure of training that experiments over batch sizes have too, with another column in the terminal."""
    return replace(_OF_BATCHES[key], terminal=InTerminal(heading, priority), small_print=None)


LARGE_BATCH_FIGURES: tuple[Figure[Any], ...] = (
    Figure(
        key="runs",
        heading="Runs",
        format=WHOLE,
        definition="Runs that have ended, at their length or because the loss diverged. Each has another seed; all "
        "candidates have the same ones.",
        page=False,
    ),
    figure_of_candidate(
        "test_accuracy", terminal=InTerminal("test accuracy", 10, "half width"), is_always_shown=True, small_print=None
    ),
    Figure(
        key="lost",
        heading="Over the reference",
        format=POINTS,
        definition="Test accuracy minus that of the reference batch, in percentage points, paired by seed: the median "
        "of the differences, which may deviate from the difference of the medians. From three "
        "seeds on it has a 95% interval, which includes the sampling error of the test data. About one interval in 20 "
        "does not contain the true difference.",
        is_estimate=True,
        terminal=InTerminal("points over reference", 9, "half width"),
    ),
    Figure(
        key="gained",
        heading="Over plain",
        format=POINTS,
        definition="Test accuracy minus that of plain training at the same batch, in percentage points, paired by "
        "seed: the gain of the remedies. From three seeds on it has an interval of the same kind.",
        is_estimate=True,
        terminal=InTerminal("over plain", 8, "half width"),
    ),
    figure_of_candidate("test_loss", terminal=InTerminal("test loss", 5), small_print=None),
    _training_figure("end_loss", "training loss", 7),
    _training_figure("end_accuracy", "training accuracy", 6),
    Figure(
        key="diverged_runs",
        heading="Diverged",
        format=WHOLE,
        definition="Runs whose loss diverged: it was not finite, or grew and stayed far above that of the first steps. "
        "Accuracies and losses leave them out.",
        usual=0,
        terminal=InTerminal("diverged", 9),
    ),
    Figure(
        key="updates",
        heading="Updates",
        format=WHOLE,
        definition="Updates of the weights in a run. At equal epochs, a batch that is larger makes fewer.",
        terminal=InTerminal("updates", 7),
    ),
    _training_figure("lr", "peak lr", 7),
    figure_of_candidate("noise_scale", terminal=InTerminal("noise scale", 4), small_print=None),
    Figure(
        key="epochs_factor",
        heading="× epochs, predicted",
        format=FACTOR,
        definition=Definition(
            "epochs_factor",
            "Epochs, predicted",
            "Epochs that a batch B needs ÷ those of the reference batch R for the same loss, as the gradient noise "
            "scale N of the reference predicts: (N + B) ÷ (N + R). It assumes SGD with a learning rate that suits the "
            "batch.",
        ),
        terminal=InTerminal("× epochs predicted", 3),
    ),
    Figure(
        key="predicted_accuracy",
        heading="Predicted accuracy",
        format=ACCURACY,
        definition="Test accuracy that the reference had reached after its epochs ÷ that factor, interpolated between "
        "evaluations: what the noise scale predicts for this batch at equal epochs. None where that is less than the "
        "time of the first evaluation.",
        terminal=InTerminal("accuracy predicted", 2),
    ),
    figure_of_candidate("samples_per_s", terminal=InTerminal("samples/s", 1), small_print=None),
)
"""Figures of a candidate, in the order of its table."""


def large_batch_csv(row: LargeBatchRow) -> dict[str, Any]:
    """Return the results of a candidate as plain numbers."""
    about = {"batch": row.batch, "remedies": "+".join(row.remedies), "reference": row.is_reference}
    values = csv_values(LARGE_BATCH_FIGURES, row)
    gains = {gain.remedy: gain.added.value for gain in row.added}
    added = {f"added_by_{remedy}": gains.get(remedy) for remedy in REMEDIES}
    return about | values | added | {"failure": row.row.failure, "diverged_at": diverged_places(row.row)}


def large_batch_json(row: LargeBatchRow) -> dict[str, Any]:
    """Return the results of a candidate as JSON data, with None for NaN and infinity."""
    found: dict[str, Any] = json_safe(
        {
            **candidate_json(row.row),
            "batch": row.batch,
            "remedies": list(row.remedies),
            "reference": row.is_reference,
            **json_values(LARGE_BATCH_FIGURES, row),
            "added": [{"remedy": gain.remedy, **gain.added.to_dict()} for gain in row.added],
        }
    )
    return found

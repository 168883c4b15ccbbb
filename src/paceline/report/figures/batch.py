"""Figures of a point of an experiment over batch sizes: its tables of time, communication, resources and training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.analysis.batch.points import BatchPoint
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.formatting import ACCURACY, COUNTS, FACTOR, FLOP_RATES, LOSS, SHARE, TENTHS, TIMES, WHOLE
from paceline.records.writer import json_safe
from paceline.report.definitions import Definition
from paceline.report.figures.candidates import CANDIDATE_FIGURES, candidate_json
from paceline.report.figures.figure import Figure, InTerminal, csv_values, json_values
from paceline.report.figures.points import (
    PART_FIGURES,
    SHAPE_FIGURES,
    figure_of_candidate,
    part_s,
    wide_interval,
)

EPOCH_S = Definition(
    "epoch_s",
    "Time per epoch",
    "Training time of one epoch, data loading included. With --epochs it is the median wall time of whole epochs, "
    "without the first if there are several. In a run of a few steps it is extrapolated: the time per step × the "
    "number of steps of an epoch at this global batch.",
)
NOT_OF_BATCHES = frozenset(
    {"ratio", "above_bound", "accuracy_gain"}  # Relative to another candidate; points have gains of their own.
    | {"compute", "overlapped", "exposed"}  # The figures of the parts have them.
    | {"batch"}  # The batch of a point is known before it is measured.
)
"""Figures of candidates that tables of batch sizes leave out."""


def _estimate(key: str, **fields: Any) -> Figure[BatchPoint]:
    """Return a figure with an interval, which is replaced where it is too wide to be useful."""

    def small_print(point: BatchPoint) -> str | None:
        found: Estimate | None = getattr(point, key)
        return wide_interval(found)

    return Figure(key=key, is_estimate=True, small_print=small_print, **fields)


TIME_FIGURES: tuple[Figure[Any], ...] = (
    Figure(
        key="threads",
        heading="Threads per rank",
        format=WHOLE,
        definition=Definition(
            "batch_threads",
            "Threads per rank",
            "Compute threads of each rank. On one machine, several ranks have as many at every world size, so that "
            "more ranks use more cores; one rank trains as single, on all cores of its host. --threads sets both.",
        ),
        terminal=InTerminal("threads", 9),
    ),
    figure_of_candidate("repeats"),
    figure_of_candidate("step_s", heading="Time per step", terminal=InTerminal("time/step", 6)),
    _estimate(
        "epoch_s",
        heading="Time per epoch",
        format=TIMES,
        definition=EPOCH_S,
        terminal=InTerminal("epoch", 10, "half width"),
    ),
    _estimate(
        "epoch_without_data_s",
        heading="Epoch without data",
        format=TIMES,
        definition="Time per epoch minus the time of its steps in which ranks load batches: gather, augment and move "
        "them to the device; averaged over ranks.",
        terminal=InTerminal("without data", 9),
    ),
    _estimate(
        "epoch_data_s",
        heading="Data per epoch",
        format=TIMES,
        definition="Time of an epoch in which ranks load batches, averaged over ranks.",
    ),
    figure_of_candidate("samples_per_s", terminal=InTerminal("samples/s", 9, "half width")),
    _estimate(
        "over_smallest",
        heading="× smallest batch",
        format=FACTOR,
        definition="Samples per second ÷ those of the smallest batch on the same ranks, paired by repeat.",
        terminal=InTerminal("× smallest", 7),
    ),
    _estimate(
        "speed_up",
        heading="Speed-up",
        format=FACTOR,
        definition=Definition(
            "batch_speed_up",
            "Speed-up",
            "Samples per second ÷ those on the fewest ranks at the same batch size, paired by repeat. One rank trains "
            "as single: one process without any strategy, on all cores of its host (see the threads per rank). None is "
            "reported where ranks share cores or GPUs.",
        ),
        terminal=InTerminal("speed-up", 8, "half width"),
    ),
)
"""Time and throughput."""
COMMUNICATION_FIGURES: tuple[Figure[Any], ...] = (
    _estimate(
        "epoch_computing_s",
        heading="Computation per epoch",
        format=TIMES,
        definition="Time of an epoch in which a rank computes, also while communication is in progress: the share of "
        "the step × the time per epoch, averaged over ranks.",
        terminal=InTerminal("computation", 9, "half width"),
    ),
    _estimate(
        "epoch_communicating_s",
        heading="Communication per epoch",
        format=TIMES,
        definition="Time of an epoch in which communication is in progress on a rank, also while it computes: the "
        "share of the step × the time per epoch, averaged over ranks. Waiting for a late rank is part of it.",
        terminal=InTerminal("communication", 9, "half width"),
    ),
    _estimate(
        "epoch_exposed_s",
        heading="Exposed per epoch",
        format=TIMES,
        definition="Part of the communication per epoch in which the rank computes nothing.",
        terminal=InTerminal("exposed", 7),
    ),
    Figure(
        key="utilisation",
        heading="Bandwidth utilisation",
        format=SHARE,
        definition=Definition(
            "batch_utilisation",
            "Bandwidth utilisation",
            "busbw of the operations that carry most gradients ÷ the point-to-point bandwidth of the slowest link that "
            "the doctor measured. Only operations during which no other was in progress count.",
        ),
        terminal=InTerminal("utilisation", 8),
    ),
    Figure(
        key="link_share",
        heading="Link use",
        format=SHARE,
        definition="Bytes that the busiest rank sends in a step, by the strategy's plan, ÷ the time in which "
        "communication is in progress ÷ the bandwidth of the slowest link. Waits lower it.",
        terminal=InTerminal("link use", 6),
    ),
    figure_of_candidate("busiest_sent_bytes", terminal=InTerminal("sent/step", 4)),
)
"""Computation and communication."""
RESOURCE_FIGURES: tuple[Figure[Any], ...] = (
    figure_of_candidate("peak_bytes", terminal=InTerminal("memory", 9)),
    _estimate(
        "cpu_cores",
        heading="Cores in use",
        format=TENTHS,
        definition="CPU time of all ranks that train ÷ wall time: the cores that they keep busy.",
        terminal=InTerminal("cores", 8),
    ),
    _estimate(
        "cpu_share",
        heading="CPU use",
        format=SHARE,
        definition="Cores in use ÷ the usable cores of the hosts of these ranks.",
        terminal=InTerminal("CPU", 8),
    ),
    figure_of_candidate("gpu_busy", terminal=InTerminal("GPU", 8)),
    figure_of_candidate("gpu_power_w", terminal=InTerminal("GPU power", 7)),
    figure_of_candidate("gpu_j_per_sample", terminal=InTerminal("GPU energy/sample", 6)),
    _estimate(
        "flop_per_s",
        heading="Model FLOP/s",
        format=FLOP_RATES,
        definition="Samples per second × the floating-point operations of one sample: 3 × those of the forward pass, "
        "which torch counts for matrix products, convolutions and attention.",
        terminal=InTerminal("model FLOP/s", 7),
    ),
    _estimate(
        "mfu",
        heading="MFU",
        format=ACCURACY,
        definition="Model FLOP utilisation: model FLOP/s ÷ the dense peak of the processors that the ranks use. On a "
        "CPU the peak is measured before the experiment, by products of 1,024 × 1,024 matrices on all usable cores of "
        "host 0, in the number format of the runs. For a GPU it is that of the data sheet (TF32 for fp32); unknown "
        "GPUs have no MFU.",
        terminal=InTerminal("MFU", 9),
    ),
)
"""Memory and processors."""
TRAINING_FIGURES: tuple[Figure[Any], ...] = (
    Figure(
        key="lr",
        heading="Peak learning rate",
        format=LOSS,
        definition="Highest learning rate that a run reached, scaled to the batch by the rule of its recipe "
        "(--scale-lr). A run of less than twice its warm-up does not reach the peak of the recipe.",
        terminal=InTerminal("peak lr", 8),
    ),
    _estimate(
        "end_loss",
        heading="Loss, last epoch",
        format=LOSS,
        definition="At the end of the runs: the mean training loss over the last epoch's worth of samples.",
        terminal=InTerminal("loss", 8),
    ),
    _estimate(
        "end_accuracy",
        heading="Accuracy, last epoch",
        format=ACCURACY,
        definition="At the end of the runs: the share of the same samples with correct predictions while training.",
        terminal=InTerminal("accuracy", 7),
    ),
    figure_of_candidate("test_loss", terminal=InTerminal("test loss", 5)),
    figure_of_candidate("test_accuracy", terminal=InTerminal("test accuracy", 10, "half width")),
    figure_of_candidate("noise_scale", terminal=InTerminal("noise scale", 9)),
    _estimate(
        "equal_time_loss",
        heading="Loss at equal time",
        format=LOSS,
        definition="At equal time: the mean training loss over the last epoch's worth of samples that a run had "
        "trained when the first run of the repeat ended. Training time counts, without the time between windows.",
        terminal=InTerminal("loss, equal time", 9),
    ),
    _estimate(
        "equal_time_accuracy",
        heading="Accuracy at equal time",
        format=ACCURACY,
        definition="At equal time: the share of the same samples with correct predictions while training.",
        terminal=InTerminal("accuracy, equal time", 9),
    ),
    _estimate(
        "equal_time_test_loss",
        heading="Test loss at equal time",
        format=LOSS,
        definition="Test loss at the last evaluation (--eval-every) before the first run of the repeat ended.",
        terminal=InTerminal("test loss, equal time", 5),
    ),
    _estimate(
        "equal_time_test_accuracy",
        heading="Test accuracy at equal time",
        format=ACCURACY,
        definition="Test accuracy at the same evaluation.",
        terminal=InTerminal("test accuracy, equal time", 9),
    ),
)
"""Losses and accuracies of runs that were trained."""


def _other_figures() -> tuple[Figure[Any], ...]:
    """Return the figures of candidates that no table names: CSV and JSON have them."""
    tables = (*TIME_FIGURES, *COMMUNICATION_FIGURES, *RESOURCE_FIGURES, *TRAINING_FIGURES)
    named = {figure.key for figure in tables} | NOT_OF_BATCHES
    kept = [figure.key for figure in CANDIDATE_FIGURES if figure.key not in named]
    return tuple(figure_of_candidate(key, terminal=None, page=False) for key in kept)


SIZE_FIGURES: tuple[Figure[Any], ...] = (
    *SHAPE_FIGURES,
    Figure(
        key="batch",
        heading="Global batch",
        format=WHOLE,
        definition="Samples per step over all ranks.",
        is_always_shown=True,
    ),
    Figure(
        key="batch_per_rank",
        heading="Per rank",
        format=COUNTS,
        definition=Definition("batch_per_rank", "Batch per rank", "Samples per step on each rank."),
    ),
)
"""Ranks and batch of a point, in every table. The terminal shows them in columns of text."""
BATCH_TABLES: dict[str, tuple[Figure[Any], ...]] = {
    "time": TIME_FIGURES,
    "communication": COMMUNICATION_FIGURES,
    "resources": RESOURCE_FIGURES,
    "training": TRAINING_FIGURES,
}
"""Figures of the tables, by the name of the table."""
OTHER_FIGURES = _other_figures()
PARTS_IN_FILES: tuple[Figure[Any], ...] = tuple(replace(figure, terminal=None, page=False) for figure in PART_FIGURES)
"""Parts of the step, which the page shows as bars."""
BATCH_FIGURES: tuple[Figure[Any], ...] = (
    *SIZE_FIGURES,
    *[figure for figures in BATCH_TABLES.values() for figure in figures],
    *OTHER_FIGURES,
    *PARTS_IN_FILES,
)
"""All figures of a point."""


def batch_point_csv(point: BatchPoint) -> dict[str, Any]:
    """Return the results of a point as plain numbers."""
    about = {"strategy": point.strategy, "role": point.candidate.role, "size": point.size}
    return {**about, **csv_values(BATCH_FIGURES, point), **_state(point), "failure": point.row.failure}


def batch_point_json(point: BatchPoint) -> dict[str, Any]:
    """Return the results of a point as JSON data, with None for NaN and infinity."""
    found: dict[str, Any] = json_safe(
        {
            **candidate_json(point.row),
            "size": point.size,
            **json_values(BATCH_FIGURES, point),
            "speed_up_over": None if point.over_fewest is None else point.over_fewest.baseline,
            "split_s": None if point.row.split is None else {part: part_s(part, point) for part in PARTS},
            **_state(point),
        }
    )
    return found


def _state(point: BatchPoint) -> dict[str, Any]:
    return {
        "epoch_is_measured": point.epoch_is_measured,
        "out_of_memory": point.out_of_memory,
        "oversubscribed": point.oversubscribed or None,
    }

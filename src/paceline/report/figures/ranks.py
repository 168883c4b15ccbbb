"""Figures of one rank: the table of ranks."""

from __future__ import annotations

from typing import Any

from paceline.analysis.ranks import RankRow
from paceline.formatting import ACCURACY, LOSS, SHARE, SIZES, TIMES, WATTS, WHOLE
from paceline.report.definitions import PEAK_MEMORY, Definition
from paceline.report.figures.figure import Figure, InTerminal, csv_values, json_values

RANK_FIGURES: tuple[Figure[RankRow], ...] = (
    Figure(
        key="samples",
        heading="Samples",
        format=WHOLE,
        definition="Samples that the rank trained on in one run; samples of several epochs count once per epoch.",
        terminal=InTerminal("samples", 8),
        is_always_shown=True,
    ),
    Figure(
        key="average_loss",
        heading="Average loss",
        format=LOSS,
        definition="Loss summed over the samples that this rank trained ÷ their number; the median over repeats.",
        terminal=InTerminal("average loss", 9),
    ),
    Figure(
        key="accuracy",
        heading="Train accuracy",
        format=ACCURACY,
        definition="Share of the samples this rank trained on that the model predicted correctly in the step that "
        "trained them.",
        terminal=InTerminal("train accuracy", 7),
    ),
    Figure(
        key="first_step_s",
        heading="First step",
        format=TIMES,
        definition="The first step of a run also allocates memory, builds buckets and selects kernels, so no average "
        "includes it.",
        unit_of="step_s",
        terminal=InTerminal("first step", 2),
    ),
    Figure(
        key="step_s",
        heading="Mean step",
        format=TIMES,
        definition=Definition(
            "rank_step_s",
            "Mean step of a rank",
            "Mean time of the rank's own steps after five warm-up steps, as in the time split; the median over "
            "repeats. A rank's step ends when the rank itself is done. The time per step of a strategy differs: it is "
            "a median, and its windows end when no rank has communication in progress.",
        ),
        terminal=InTerminal("mean time/step", 10),
    ),
    Figure(
        key="median_step_s",
        heading="Median step",
        format=TIMES,
        definition="Median time of the rank's own steps, of the same steps as their mean.",
        unit_of="step_s",
        page=False,
    ),
    Figure(
        key="data_s",
        heading="Data",
        format=TIMES,
        definition="Loading the batch: gathering, augmenting and moving it to the device.",
        unit_of="step_s",
    ),
    Figure(
        key="forward_s",
        heading="Forward",
        format=TIMES,
        definition="The forward pass, including counting correct predictions.",
        unit_of="step_s",
        terminal=InTerminal("forward", 3),
    ),
    Figure(
        key="backward_s",
        heading="Backward",
        format=TIMES,
        definition="The backward pass, including time spent waiting for other ranks inside it, as under DDP.",
        unit_of="step_s",
        terminal=InTerminal("backward", 3),
    ),
    Figure(
        key="update_s",
        heading="Update",
        format=TIMES,
        definition="Exchange of gradients where it follows the backward pass, clipping, and the optimiser.",
        unit_of="step_s",
        terminal=InTerminal("update", 3),
    ),
    Figure(
        key="cpu_share",
        heading="CPU",
        format=SHARE,
        definition="CPU time of all threads of the rank's process, in user and system mode, ÷ wall time, from the "
        "start of its first step to the end of its last. 100% is one core all the time. Worker processes of a data "
        "loader are not included.",
        terminal=InTerminal("CPU", 6),
    ),
    Figure(
        key="resident_bytes",
        heading="Resident memory",
        format=SIZES,
        definition="Memory of the rank's process in RAM: the median of samples taken during training.",
        terminal=InTerminal("memory", 5),
    ),
    Figure(key="peak_bytes", heading="Peak memory", format=SIZES, definition=PEAK_MEMORY),
    Figure(
        key="device_bytes",
        heading="GPU memory",
        format=SIZES,
        definition="Memory of tensors on the rank's GPU: the median of samples taken during training.",
        terminal=InTerminal("GPU memory", 4),
    ),
    Figure(
        key="device_used_bytes",
        heading="GPU memory in use",
        format=SIZES,
        definition="Highest total use of that GPU's memory, by all processes, in any sample.",
    ),
    Figure(
        key="gpu_busy",
        heading="GPU",
        format=SHARE,
        definition=Definition(
            "rank_gpu_busy",
            "GPU (of a rank)",
            "Share of the time in which the rank's GPU ran a kernel, by NVML: the mean during training. It is the "
            "GPU's figure, not the rank's: all processes on the GPU count, and ranks that share a GPU have the "
            "same figure.",
        ),
        terminal=InTerminal("GPU", 6),
    ),
    Figure(
        key="gpu_power_w",
        heading="GPU power",
        format=WATTS,
        definition=Definition(
            "rank_gpu_power_w",
            "GPU power (of a rank)",
            "Mean power of the rank's GPU during training, by NVML. Ranks that share a GPU have the same figure.",
        ),
        terminal=InTerminal("GPU power", 4),
    ),
    Figure(
        key="collections",
        heading="GC runs",
        format=WHOLE,
        definition=Definition(
            "collections",
            "GC runs (garbage collections)",
            "Python garbage collections during training, which stop all Python code of a rank: full collections, and "
            "others longer than a millisecond.",
        ),
        usual=0,
    ),
    Figure(
        key="collection_s",
        heading="GC time",
        format=TIMES,
        definition="Total time of these garbage collections.",
        usual=0,
    ),
    Figure(
        key="sent_bytes",
        heading="Sent",
        format=SIZES,
        definition="Bytes that the rank sends in one step, by the strategy's plan.",
    ),
    Figure(
        key="received_bytes",
        heading="Received",
        format=SIZES,
        definition="Bytes that the rank receives in one step, by the strategy's plan.",
    ),
)


def rank_csv(candidate: str, rank: RankRow) -> dict[str, Any]:
    """Return the results of a rank as plain numbers."""
    return {"candidate": candidate, "rank": rank.rank, **csv_values(RANK_FIGURES, rank)}


def rank_json(rank: RankRow) -> dict[str, Any]:
    """Return the results of a rank as JSON data."""
    return {"rank": rank.rank, **json_values(RANK_FIGURES, rank)}

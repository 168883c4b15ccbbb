"""Figures of a candidate: the comparison table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from paceline.analysis.comparison import CandidateRow
from paceline.analysis.divergence import DivergedRun
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.formatting import ACCURACY, ENERGIES, FACTOR, LOSS, SHARE, SIZES, TENTHS, TIMES, WATTS, WHOLE
from paceline.records.writer import json_safe
from paceline.report.definitions import PEAK_MEMORY, SPLIT_TERMS
from paceline.report.figures.figure import Figure, InTerminal, csv_values, json_values
from paceline.report.figures.ranks import rank_json


def _share(part: str, row: CandidateRow) -> Estimate | None:
    found: Estimate | None = None if row.split is None else getattr(row.split, part)
    return found


def _parts(row: CandidateRow) -> tuple[float, ...]:
    return () if row.split is None else tuple(row.split.mean.share(part) for part in PARTS)


CANDIDATE_FIGURES: tuple[Figure[CandidateRow], ...] = (
    Figure(
        key="repeats",
        heading="Repeats",
        format=WHOLE,
        definition="Runs that were timed.",
        page=False,
    ),
    Figure(
        key="step_s",
        heading="Median time per step",
        format=TIMES,
        definition="Wall time of a window of steps on the slowest rank ÷ the number of steps in it. A window starts "
        "with its first step and ends when no communication is in progress any more. The first window of a run is "
        "never counted. The value is the median over the windows of a run, then the median over repeats.",
        is_estimate=True,
        terminal=InTerminal("time/step", 10, "column"),
        is_always_shown=True,
        bar=_parts,
    ),
    Figure(
        key="ratio",
        heading="Ratio to the reference",
        format=FACTOR,
        definition="Time per sample ÷ that of the reference, paired by repeat. With equal batches it is the ratio of "
        "the times per step. Less than 1 is faster.",
        is_estimate=True,
        terminal=InTerminal("÷ reference", 9),
    ),
    Figure(
        key="compute",
        heading="Compute",
        format=SHARE,
        definition=SPLIT_TERMS["compute"],
        value=lambda row: _share("compute", row),
        is_estimate=True,
        terminal=InTerminal("compute", 4),
    ),
    Figure(
        key="overlapped",
        heading="Overlapped",
        format=SHARE,
        definition=SPLIT_TERMS["overlapped"],
        value=lambda row: _share("overlapped", row),
        is_estimate=True,
        terminal=InTerminal("overlapped", 4),
        page=False,
    ),
    Figure(
        key="exposed",
        heading="Exposed",
        format=SHARE,
        definition=SPLIT_TERMS["exposed"],
        is_estimate=True,
        terminal=InTerminal("exposed", 8),
    ),
    Figure(
        key="above_bound",
        heading="Above the bound",
        format=SHARE,
        definition="Share of the step that is saved when nothing is exchanged: 1 − the bound's time ÷ this strategy's "
        "time, paired by repeat. Communication that overlaps with computing does not count, except for the cores that "
        "it uses.",
        is_estimate=True,
        terminal=InTerminal("above bound", 8),
        in_place_of="compute",
    ),
    Figure(
        key="busiest_sent_bytes",
        heading="Sent per step",
        format=SIZES,
        definition="Bytes that the busiest rank sends in one step, by the strategy's plan: gradients and broadcast "
        "buffers. 1 MB is a million bytes.",
        terminal=InTerminal("sent/step", 6),
    ),
    Figure(
        key="samples_per_s",
        heading="Samples per second",
        format=WHOLE,
        definition="Mean samples per step over all ranks ÷ the time per step (the median over windows).",
        is_estimate=True,
        terminal=InTerminal("samples/s", 4),
    ),
    Figure(
        key="train_loss",
        heading="Train loss",
        format=LOSS,
        definition=(
            "Loss summed over all samples trained ÷ their number, over the whole run, with label smoothing if the "
            "recipe has it; the median over repeats."
        ),
        is_estimate=True,
        terminal=InTerminal("loss", 3),
    ),
    Figure(
        key="test_loss",
        heading="Test loss",
        format=LOSS,
        definition=(
            "Mean loss over the test data, without label smoothing, of the synchronised weights at the end of the run."
        ),
        is_estimate=True,
        terminal=InTerminal("test loss", 1),
    ),
    Figure(
        key="test_accuracy",
        heading="Test accuracy",
        format=ACCURACY,
        definition="Share of the test data that the synchronised weights predict correctly at the end of the run. Each "
        "repeat has its own seed, shared by all strategies. Only differences larger than the spread between seeds "
        "count.",
        is_estimate=True,
        terminal=InTerminal("accuracy", 7),
    ),
    Figure(
        key="best_accuracy",
        heading="Best accuracy",
        format=ACCURACY,
        definition="Highest test accuracy of the synchronised weights in a run that is tested while it trains "
        "(--eval-every); the median over repeats. The best of several results is higher by chance, too: compare "
        "candidates by the accuracy at the end.",
        is_estimate=True,
    ),
    Figure(
        key="best_step",
        heading="Step of the best accuracy",
        format=WHOLE,
        definition="Steps done when a run reached its best test accuracy, or its lowest test loss where no accuracy is "
        "defined; the median over repeats.",
        page=False,
    ),
    Figure(
        key="accuracy_gain",
        heading="Accuracy gain",
        format=ACCURACY,
        definition="Test accuracy minus that of the reference, paired by seed, from three seeds on. Its interval is "
        "corrected for the number of candidates.",
        is_estimate=True,
        page=False,
    ),
    Figure(
        key="peak_bytes",
        heading="Peak memory",
        format=SIZES,
        definition=PEAK_MEMORY,
        terminal=InTerminal("memory", 2),
    ),
    Figure(
        key="cpu_s",
        heading="CPU per step",
        format=TIMES,
        definition="CPU-seconds per step, summed over the ranks that train: the time per step × the sum of the ranks' "
        "CPU time ÷ wall time during training. Servers that do not train are not included.",
        is_estimate=True,
        terminal=InTerminal("CPU/step", 2),
    ),
    Figure(
        key="gpu_busy",
        heading="GPU use",
        format=SHARE,
        definition="Share of the time in which a GPU ran a kernel, by NVML: the mean during training and over the "
        "GPUs of the ranks. All processes on a GPU count, and a GPU that ranks share counts once. A kernel that uses a "
        "small part of the GPU counts like one that uses all of it, so 100% does not mean that nothing can be gained.",
        is_estimate=True,
        terminal=InTerminal("GPU", 3),
    ),
    Figure(
        key="gpu_power_w",
        heading="GPU power",
        format=WATTS,
        definition="Mean power of the GPUs of all ranks together during training, by NVML: the increase of their "
        "energy counters ÷ time, or the mean of samples where a GPU has no counter. A GPU that ranks share counts "
        "once.",
        is_estimate=True,
        terminal=InTerminal("GPU power", 2),
    ),
    Figure(
        key="gpu_j_per_sample",
        heading="GPU energy per sample",
        format=ENERGIES,
        definition="GPU power ÷ samples per second: the energy of the GPUs for one training sample, without that of "
        "the hosts.",
        is_estimate=True,
        terminal=InTerminal("GPU energy/sample", 1),
    ),
    Figure(
        key="checkpoint_share",
        heading="Checkpoints",
        format=ACCURACY,
        definition="Share of the run's time that checkpoints cost: the time for which training waits for them, and the "
        "time that steps take longer while one is written in the background. It is not part of the time per step, "
        "because checkpoints are written between the timed windows, and its second part is lost in a median.",
        is_estimate=True,
        terminal=InTerminal("checkpoints", 8),
    ),
    Figure(
        key="staleness",
        heading="Gradient staleness",
        format=TENTHS,
        definition="For asynchronous strategies: the number of updates a server has made since it sent the weights "
        "that a gradient was computed with. The mean over all gradients and servers, then the median over repeats. "
        "With n equally fast workers it is about n − 1.",
        is_estimate=True,
        terminal=InTerminal("staleness", 6),
    ),
    Figure(
        key="over_limit_share",
        heading="Late gradients",
        format=ACCURACY,
        definition="Share of gradients with a higher staleness than the strategy allows. They are damped or dropped, "
        "as configured.",
        is_estimate=True,
        terminal=InTerminal("late", 5),
    ),
    Figure(
        key="noise_scale",
        heading="Noise scale",
        format=WHOLE,
        definition="Gradient noise scale in samples: variance of one sample's gradient ÷ squared norm of the mean "
        "gradient, both averaged over the last half of a run. It estimates the critical batch: well below it, twice "
        "the batch needs nearly half the steps; well above it, hardly fewer. It grows while a model learns, and "
        "assumes updates like those of SGD.",
        is_estimate=True,
        terminal=InTerminal("noise scale", 9),
    ),
    Figure(
        key="skipped_steps",
        heading="Skipped steps",
        format=WHOLE,
        definition="Steps without an update, because a gradient was not finite on some rank, over all repeats. "
        "All ranks skip such a step together. Losses and training accuracy leave it out.",
        terminal=InTerminal("skipped", 5),
    ),
    Figure(
        key="imbalance",
        heading="Imbalance of traffic",
        format=FACTOR,
        definition="Bytes sent and received by the busiest rank ÷ those of the least busy rank.",
        page=False,
    ),
    Figure(
        key="rank_step_spread",
        heading="Spread between ranks",
        format=SHARE,
        definition="Relative difference of the ranks' median step times, if larger than a synchronous run explains.",
        page=False,
    ),
    Figure(
        key="workers",
        heading="Workers",
        format=WHOLE,
        definition="Ranks that train.",
        page=False,
    ),
    Figure(
        key="batch",
        heading="Global batch",
        format=WHOLE,
        definition="Samples per step over all ranks.",
        page=False,
    ),
)


def candidate_csv(row: CandidateRow) -> dict[str, Any]:
    """Return the results of a candidate as plain numbers."""
    about = {key: getattr(row.candidate, key) for key in ("strategy", "role", "lossless")}
    values = csv_values(CANDIDATE_FIGURES, row)
    remarks = {"failure": row.failure, "diverged": diverged_places(row)}
    return {"candidate": row.candidate.name, **about, **values, **remarks}


def diverged_places(row: CandidateRow) -> str | None:
    """Return steps and seeds of the diverged runs of a candidate as text; None if there are none."""
    return "; ".join(one.place for one in row.diverged) or None


def _diverged_json(diverged: DivergedRun) -> dict[str, Any]:
    """Return seed, step and losses of a diverged run as JSON data."""
    return {"seed": diverged.seed, **msgspec.structs.asdict(diverged.divergence)}


def candidate_json(row: CandidateRow) -> dict[str, Any]:
    """Return the results of a candidate as JSON data, with None for NaN and infinity."""
    found: dict[str, Any] = json_safe(
        {
            "name": row.candidate.name,
            **row.candidate.to_dict(),
            **json_values(CANDIDATE_FIGURES, row),
            "split": None if row.split is None else asdict(row.split),
            "ranks": [rank_json(rank) for rank in row.ranks],
            "failure": row.failure,
            "exclusion": row.exclusion,
            "diverged": [_diverged_json(one) for one in row.diverged],
        }
    )
    return found

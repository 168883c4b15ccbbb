"""The tables of a scaling experiment: columns for the page, rows for CSV, and what each figure means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.analysis.scaling import Point, Scaling
from paceline.analysis.split import PARTS
from paceline.analysis.statistics import Estimate
from paceline.report.columns import NOTHING, TIMES, Cell, Column, Unit, estimate_column, percent_unit, plain_column
from paceline.report.csv_tables import save_tables
from paceline.report.definitions import DEFINITIONS, Definition

COUNT = Unit(1, "", 0)
TIMES_AS_FAST = Unit(1, "", 2)
GAINS = {"over_single": "single", "over_itself": "itself"}

SCALING_DEFINITIONS = {
    **{key: DEFINITIONS[key] for key in ("strategy", "step_s", "interval")},
    "ranks": Definition("Ranks", "The world size: processes that train together, over all hosts."),
    "hosts": Definition("Hosts", "The hosts that the ranks are on, as many on each."),
    "batch": Definition("Global batch", "Samples per step over all ranks: kept in strong scaling, grown in weak."),
    "batch_per_rank": Definition("Batch per rank", "Samples per step on each rank: kept in weak scaling."),
    "epoch_s": Definition("Time per epoch", "Time per iteration × the steps that an epoch has at this global batch."),
    "speed_up": Definition(
        "Speed-up",
        "Samples per second ÷ those of the baseline, paired by repeat. In strong scaling, where the batch is the same, "
        "that is T₁/T_N; in weak scaling N·T₁/T_N, since N ranks train N times the samples in a step.",
    ),
    "efficiency": Definition(
        "Efficiency",
        "Speed-up ÷ the number of ranks N: in strong scaling E = T₁/(N·T_N) at a fixed global batch, in weak scaling "
        "E = T₁/T_N at a fixed batch per rank. Claimed where every rank had what the baseline had to compute with.",
    ),
    "baselines": Definition(
        "Baselines",
        "single is one process, without any strategy, with what one host has. Itself is the same strategy on one rank, "
        "where it has nobody to send to: what it takes beyond single is its own cost.",
    ),
    "crowded": Definition(
        "No speed-up claimed",
        "Ranks that have not got a core each wait for each other's turn: their times say nothing about more machines. "
        "Hosts with a share of the cores (--host-cpus) are another matter.",
    ),
    **{key: DEFINITIONS[key] for key in DEFINITIONS if key.startswith("split_") or key == "samples_per_s"},
    **{key: DEFINITIONS[key] for key in ("parity", "lossless", "measuring_cost", "busbw")},
}
"""By the name of the figure in the code."""


def scaling_columns(points: Sequence[Point]) -> list[Column]:
    """Every figure of the table but the strategy's name; what was not measured has no column."""
    rows = [point.row for point in points]
    columns = [
        plain_column("ranks", "Ranks", points, COUNT),
        *([plain_column("hosts", "Hosts", points, COUNT)] if any(point.hosts > 1 for point in points) else []),
        plain_column("batch", "Global batch", points, COUNT),
        plain_column("batch_per_rank", "Per rank", points, _batch_unit(points)),
        estimate_column("step_s", "Time per iteration", [row.step_s for row in rows], TIMES),
        _epochs(points),
    ]
    for key, baseline in GAINS.items():
        columns += _gain_columns(points, key, baseline)
    columns += [_part_column(points, part) for part in PARTS]
    return [column for column in columns if column.key == "step_s" or not column.is_empty]


def _epochs(points: Sequence[Point]) -> Column:
    """Without intervals: they are those of the time per iteration."""
    times = [None if point.epoch_s is None else replace(point.epoch_s, low=None, high=None) for point in points]
    return estimate_column("epoch_s", "Time per epoch", times, TIMES)


def _batch_unit(points: Sequence[Point]) -> Unit:
    return COUNT if all(point.batch_per_rank == round(point.batch_per_rank) for point in points) else Unit(1, "", 1)


def _gain_columns(points: Sequence[Point], key: str, baseline: str) -> list[Column]:
    gains = [point.gains[key] for point in points]
    speed_ups = [None if gain is None else gain.speed_up for gain in gains]
    shares = [None if gain is None else gain.efficiency for gain in gains]
    faster = estimate_column(f"speed_up_{key}", f"× {baseline}", speed_ups, TIMES_AS_FAST, definition="speed_up")
    cells = [replace(c, interval=p.crowded) if p.crowded else c for c, p in zip(faster.cells, points, strict=True)]
    return [
        replace(faster, cells=cells),
        estimate_column(
            f"efficiency_{key}", f"Efficiency to {baseline}", shares, percent_unit(0), definition="efficiency"
        ),
    ]


def _part_column(points: Sequence[Point], part: str) -> Column:
    cells = []
    for point in points:
        split = point.row.split if point.row.is_measured else None
        share = None if split is None else split.mean.share(part)
        cells.append(Cell(NOTHING) if share is None else Cell(percent_unit(0).write(share), share))
    return Column(part, DEFINITIONS[f"split_{part}"].term, "%", f"split_{part}", cells)


def write_scaling_tables(scaling: Scaling, folder: Path) -> list[Path]:
    """Writes the tables as CSV, with plain numbers, into a folder; returns the files."""
    rows = [_csv_row(point) for mode in scaling.modes for point in scaling.points(mode)]
    proofs = [proof.to_dict() for proof in scaling.comparison.proofs]
    return save_tables({"scaling.csv": rows, "proofs.csv": proofs}, folder)


def _csv_row(point: Point) -> dict[str, Any]:
    row = point.row
    values: dict[str, Any] = {"mode": point.mode, "strategy": point.strategy, "role": row.contender.role}
    values |= {key: getattr(point, key) for key in ("ranks", "hosts", "ranks_per_host", "batch", "batch_per_rank")}
    values["repeats"] = row.repeats
    for name, estimate in (("step_s", row.step_s), ("epoch_s", point.epoch_s), ("samples_per_s", row.samples_per_s)):
        values |= _csv_estimate(name, estimate)
    for key, gain in point.gains.items():
        values |= _csv_estimate(f"speed_up_{key}", None if gain is None else gain.speed_up)
        values |= _csv_estimate(f"efficiency_{key}", None if gain is None else gain.efficiency)
    for part in PARTS:
        values[f"{part}_s"] = None if row.split is None else getattr(row.split.mean, f"{part}_s")
    return values | {"crowded": point.crowded or None, "failure": row.failure}


def _csv_estimate(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    values = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))

"""The tables of a scaling experiment: columns for the page, rows for CSV, and what each figure means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.analysis.scaling.curves import Scaling, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.report.definitions import DEFINITIONS, Definition
from paceline.report.scaling_verdict import vague
from paceline.report.tables.columns import TIMES, PageColumn, Unit, estimate_column, percent_unit, plain_column
from paceline.report.tables.csv_files import save_tables
from paceline.report.tables.payload import payload_rows, rank_bytes_rows

COUNT = Unit(1, "", 0)
TIMES_AS_FAST = Unit(1, "", 2)
GAINS = {"over_single": "single", "over_one_rank": "itself"}

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
    "oversubscribed": Definition(
        "No speed-up claimed",
        "Ranks that have not got a core each wait for each other's turn: their times say nothing about more machines. "
        "Hosts with a share of the cores (--host-cpus) are another matter.",
    ),
    **{key: DEFINITIONS[key] for key in DEFINITIONS if key.startswith("split_") or key == "samples_per_s"},
    **{key: DEFINITIONS[key] for key in ("socket_bytes", "socket_plan", "socket_proof", "framing_bytes")},
    **{key: DEFINITIONS[key] for key in ("rank", "interface_bytes", "parity", "lossless", "measuring_cost", "busbw")},
}
"""By the name of the figure in the code."""


def scaling_columns(points: Sequence[ScalingPoint]) -> list[PageColumn]:
    """Every figure of the table but the strategy's name; what was not measured has no column."""
    columns = [
        *_shape_columns(points),
        plain_column("batch", "Global batch", points, COUNT),
        plain_column("batch_per_rank", "Per rank", points, _batch_unit(points)),
        _ratio_column("step_s", "Time per iteration", [point.row.step_s for point in points], TIMES),
        _ratio_column("epoch_s", "Time per epoch", [point.epoch_s for point in points], TIMES),
    ]
    for key, baseline in GAINS.items():
        columns += _gain_columns(points, key, baseline)
    return [column for column in columns if column.key == "step_s" or not column.is_empty]


def part_columns(points: Sequence[ScalingPoint]) -> list[PageColumn]:
    """The shares of a step that go into computing and communicating, at points whose events were collected."""
    splits = [point.row.split for point in points]
    return [
        *_shape_columns(points),
        *[
            estimate_column(
                part,
                DEFINITIONS[f"split_{part}"].term,
                [None if split is None else getattr(split, part) for split in splits],
                percent_unit(0),
                definition=f"split_{part}",
            )
            for part in PARTS
        ],
    ]


def _shape_columns(points: Sequence[ScalingPoint]) -> list[PageColumn]:
    several = any(point.hosts > 1 for point in points)
    hosts = [plain_column("hosts", "Hosts", points, COUNT)] if several else []
    return [plain_column("ranks", "Ranks", points, COUNT), *hosts]


def _ratio_column(
    key: str,
    heading: str,
    estimates: Sequence[Estimate | None],
    how: Unit | Sequence[tuple[float, str]],
    definition: str | None = None,
) -> PageColumn:
    """A column of times or ratios; an interval too wide to be read says from how few repeats it is."""
    column = estimate_column(key, heading, estimates, how, definition=definition)
    cells = [
        cell if own is None or not own.is_vague else replace(cell, interval=vague(own))
        for cell, own in zip(column.cells, estimates, strict=True)
    ]
    return replace(column, cells=cells)


def _batch_unit(points: Sequence[ScalingPoint]) -> Unit:
    return COUNT if all(point.batch_per_rank == round(point.batch_per_rank) for point in points) else Unit(1, "", 1)


def _gain_columns(points: Sequence[ScalingPoint], key: str, baseline: str) -> list[PageColumn]:
    gains = [point.gains[key] for point in points]
    speed_ups = [None if gain is None else gain.speed_up for gain in gains]
    shares = [None if gain is None else gain.efficiency for gain in gains]
    faster = _ratio_column(f"speed_up_{key}", f"× {baseline}", speed_ups, TIMES_AS_FAST, definition="speed_up")
    cells = [
        replace(c, interval=p.oversubscribed) if p.oversubscribed else c
        for c, p in zip(faster.cells, points, strict=True)
    ]
    return [
        replace(faster, cells=cells),
        _ratio_column(
            f"efficiency_{key}", f"Efficiency to {baseline}", shares, percent_unit(0), definition="efficiency"
        ),
    ]


def write_scaling_tables(scaling: Scaling, folder: Path) -> list[Path]:
    """Writes the tables as CSV, with plain numbers, into a folder; returns the files."""
    rows = [_csv_row(point) for mode in scaling.modes for point in scaling.points(mode)]
    comparison = scaling.comparison
    tables = {
        "scaling.csv": rows,
        "bytes_by_rank.csv": [asdict(row) for row in rank_bytes_rows(comparison.payloads)],
        "payload.csv": payload_rows(comparison.payloads),
        "proofs.csv": [proof.to_dict() for proof in comparison.proofs],
    }
    return save_tables(tables, folder)


def _csv_row(point: ScalingPoint) -> dict[str, Any]:
    row = point.row
    values: dict[str, Any] = {"mode": point.mode, "strategy": point.strategy, "role": row.candidate.role}
    values |= {key: getattr(point, key) for key in ("ranks", "hosts", "ranks_per_host", "batch", "batch_per_rank")}
    values["repeats"] = row.repeats
    for name, estimate in (("step_s", row.step_s), ("epoch_s", point.epoch_s), ("samples_per_s", row.samples_per_s)):
        values |= _csv_estimate(name, estimate)
    for key, gain in point.gains.items():
        values |= _csv_estimate(f"speed_up_{key}", None if gain is None else gain.speed_up)
        values |= _csv_estimate(f"efficiency_{key}", None if gain is None else gain.efficiency)
    for part in PARTS:
        values[f"{part}_s"] = None if row.split is None else getattr(row.split.mean, f"{part}_s")
        values |= _csv_estimate(f"{part}_share", None if row.split is None else getattr(row.split, part))
    return values | {"oversubscribed": point.oversubscribed or None, "failure": row.failure}


def _csv_estimate(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    values = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))

"""Figures of a point of a scaling experiment: its table, and that of its time split."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from paceline.analysis.comparison import CandidateRow
from paceline.analysis.scaling.curves import ScalingGain, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.formatting import COUNTS, FACTOR, SHARE, TIMES, WHOLE
from paceline.records.writer import json_safe
from paceline.report.definitions import EFFICIENCY, SPEED_UP, SPLIT_TERMS, Definition
from paceline.report.figures.candidates import CANDIDATE_FIGURES, candidate_json, diverged_places
from paceline.report.figures.figure import Figure, FigureValue, InTerminal, csv_values, figures_of_part, json_values

_OF_CANDIDATE = {figure.key: figure for figure in CANDIDATE_FIGURES}


class MeasuredPoint(Protocol):
    """Point of an experiment over ranks or batch sizes."""

    @property
    def row(self) -> CandidateRow:
        """Row of its candidate."""


class Baseline(NamedTuple):
    """Name of what a point is compared with."""

    short: str
    """Name in headings."""
    full: str


BASELINES = {
    "over_single": Baseline("single", "single"),
    "over_one_rank": Baseline("itself", "itself on 1 rank"),
}
"""Baselines by the gain over them."""
IN_TERMINAL = {"compute": InTerminal("compute", 5, "half width"), "exposed": InTerminal("exposed", 6, "half width")}
"""Parts of the step that the terminal shows; the page and the JSON output have all four."""
NOT_OF_POINTS = frozenset(
    {"ratio", "above_bound", "accuracy_gain"}  # Relative to another candidate; points have gains over baselines.
    | {"compute", "overlapped", "exposed"}  # The figures of the parts have them.
    | {"best_accuracy", "best_step"}  # Points are not tested while they train.
    | {"batch"}  # The batch of a point is known before it is measured.
)
"""Figures of candidates that tables of points leave out."""
IN_FILES_ONLY = frozenset({"samples_per_s", "train_loss", "test_loss", "test_accuracy"})
"""Figures of candidates that only CSV and JSON have for points: points are compared by time, not by loss."""
LEAST_PRIORITY = 1
"""Priority in the terminal of the figures of candidates that the tables of points do not name: it is dropped first."""


def wide_interval(found: FigureValue) -> str | None:
    """Return the text that replaces an interval too wide to be useful; None for an interval that is not."""
    if not isinstance(found, Estimate) or not found.is_vague or found.low == found.high:
        return None
    return f"too wide (n = {found.repeats})"


def figure_of_candidate(key: str, **changes: Any) -> Figure[Any]:
    """Return a figure of candidates as a figure of points, which have a row, with the definition that it has there."""
    figure = _OF_CANDIDATE[key]
    (found,) = figures_of_part("row", [figure])
    small_print = (lambda point: wide_interval(found.read(point))) if figure.is_estimate else None
    return replace(found, **{"definition": figure.defined, "bar": None, "small_print": small_print, **changes})


def _other_figures(named: Collection[str]) -> tuple[Figure[ScalingPoint], ...]:
    """Return the figures of candidates that are not among those named."""
    return tuple(
        figure_of_candidate(key, **_where(figure))
        for key, figure in _OF_CANDIDATE.items()
        if key not in {*named, *NOT_OF_POINTS}
    )


def _where(figure: Figure[CandidateRow]) -> dict[str, Any]:
    if figure.key in IN_FILES_ONLY:
        return {"terminal": None, "page": False}
    return {"terminal": figure.terminal and replace(figure.terminal, priority=LEAST_PRIORITY)}


def _gain(key: str, point: ScalingPoint) -> ScalingGain | None:
    return point.gains[key]


def _speed_up(key: str, point: ScalingPoint) -> Estimate | None:
    return None if (gain := _gain(key, point)) is None else gain.speed_up


def _efficiency(key: str, point: ScalingPoint) -> Estimate | None:
    return None if (gain := _gain(key, point)) is None else gain.efficiency


def _part_share(part: str, point: MeasuredPoint) -> Estimate | None:
    found: Estimate | None = None if point.row.split is None else getattr(point.row.split, part)
    return found


def part_s(part: str, point: MeasuredPoint) -> float | None:
    return None if point.row.split is None else float(getattr(point.row.split.mean, f"{part}_s"))


def _gain_figures(key: str, baseline: Baseline) -> tuple[Figure[ScalingPoint], ...]:
    """Return speed-up and efficiency over one baseline; JSON has them together, under the baseline."""
    heading = f"vs {baseline.short}"
    priority = 9 if key == "over_single" else 8
    return (
        Figure(
            key=f"speed_up_{key}",
            heading=f"× {baseline.short}",
            format=FACTOR,
            definition=SPEED_UP,
            value=partial(_speed_up, key),
            is_estimate=True,
            terminal=InTerminal(heading, priority, "half width"),
            json=False,
            small_print=lambda point: point.oversubscribed or wide_interval(_speed_up(key, point)),
        ),
        Figure(
            key=f"efficiency_{key}",
            heading=f"Efficiency vs {baseline.short}",
            format=SHARE,
            definition=EFFICIENCY,
            value=partial(_efficiency, key),
            is_estimate=True,
            terminal=InTerminal(heading, priority),
            json=False,
            small_print=lambda point: wide_interval(_efficiency(key, point)),
        ),
    )


SHAPE_FIGURES: tuple[Figure[Any], ...] = (
    Figure(
        key="ranks",
        heading="Ranks",
        format=WHOLE,
        definition="The world size: processes that train together, over all hosts.",
    ),
    Figure(
        key="hosts",
        heading="Hosts",
        format=WHOLE,
        definition="Number of hosts; each has the same number of ranks.",
        usual=1,
    ),
    Figure(
        key="ranks_per_host",
        heading="Ranks per host",
        format=WHOLE,
        definition="Ranks on each host.",
        page=False,
    ),
)
"""Size of a point, in both tables. The terminal shows ranks and hosts in one column."""

POINT_FIGURES: tuple[Figure[ScalingPoint], ...] = (
    *SHAPE_FIGURES,
    Figure(
        key="batch",
        heading="Global batch",
        format=WHOLE,
        definition="Samples per step over all ranks: constant in strong scaling, proportional to the ranks in weak "
        "scaling.",
        terminal=InTerminal("batch", 7),
    ),
    Figure(
        key="batch_per_rank",
        heading="Per rank",
        format=COUNTS,
        definition=Definition(
            "batch_per_rank", "Batch per rank", "Samples per step on each rank: constant in weak scaling."
        ),
    ),
    figure_of_candidate("repeats"),
    figure_of_candidate("step_s", heading="Time per step", terminal=InTerminal("time/step", 10, "half width")),
    Figure(
        key="epoch_s",
        heading="Time per epoch",
        format=TIMES,
        definition="Time per step × the number of steps of an epoch at this global batch.",
        is_estimate=True,
        terminal=InTerminal("epoch", 3),
        small_print=lambda point: wide_interval(point.epoch_s),
    ),
    *[figure for key, baseline in BASELINES.items() for figure in _gain_figures(key, baseline)],
    *_other_figures(named=("repeats", "step_s")),
)


def _part_figures(part: str) -> tuple[Figure[Any], ...]:
    """Return a part of the time split: seconds for CSV, and the share of the step; JSON has both under the split."""
    return (
        Figure(
            key=f"{part}_s",
            heading=SPLIT_TERMS[part].term,
            format=TIMES,
            definition=SPLIT_TERMS[part],
            value=partial(part_s, part),
            page=False,
            json=False,
        ),
        Figure(
            key=f"{part}_share",
            heading=SPLIT_TERMS[part].term,
            format=SHARE,
            definition=SPLIT_TERMS[part],
            value=partial(_part_share, part),
            is_estimate=True,
            terminal=IN_TERMINAL.get(part),
            json=False,
        ),
    )


PART_FIGURES: tuple[Figure[Any], ...] = tuple(figure for part in PARTS for figure in _part_figures(part))


def point_csv(point: ScalingPoint) -> dict[str, Any]:
    """Return the results of a point as plain numbers."""
    about = {"mode": point.mode, "strategy": point.strategy, "role": point.candidate.role}
    figures = csv_values((*POINT_FIGURES, *PART_FIGURES), point)
    remarks = {"oversubscribed": point.oversubscribed or None, "failure": point.row.failure}
    return {**about, **figures, **remarks, "diverged": diverged_places(point.row)}


def point_json(point: ScalingPoint) -> dict[str, Any]:
    """Return the results of a point as JSON data, with None for NaN and infinity."""
    found: dict[str, Any] = json_safe(
        {
            **candidate_json(point.row),
            "mode": point.mode,
            "oversubscribed": point.oversubscribed or None,
            **json_values((*POINT_FIGURES, *PART_FIGURES), point),
            **{name: gain and gain.to_dict() for name, gain in point.gains.items()},
            "split_s": None if point.row.split is None else {part: part_s(part, point) for part in PARTS},
        }
    )
    return found

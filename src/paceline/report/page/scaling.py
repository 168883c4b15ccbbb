"""HTML report of a scaling experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingPoint
from paceline.analysis.traffic.payload import Payload
from paceline.formatting import join_names, plural
from paceline.report.definitions import SCALING_TERMS, SPLIT_TERMS, TERMS
from paceline.report.figures.columns import page_columns
from paceline.report.figures.figure import definitions
from paceline.report.figures.points import PART_FIGURES, POINT_FIGURES, SHAPE_FIGURES
from paceline.report.figures.steps import OPERATION_FIGURES, RANK_BYTES_FIGURES
from paceline.report.page.document import (
    render_document,
    write_document,
)
from paceline.report.page.header import header_context, run_facts
from paceline.report.page.sections import machine_context, payload_context
from paceline.report.page.tables import PageRow, PageTable
from paceline.report.plots.drawing import Json
from paceline.report.plots.link import link
from paceline.report.plots.palette import PARTS as PART_COLOURS
from paceline.report.plots.scaling import curves_figure, strategy_colours
from paceline.report.plots.scaling_split import split_figure
from paceline.report.run_description import outcome
from paceline.report.scaling_verdict import (
    TITLES,
    closing_sentences,
    format_hosts_used,
    format_mode,
    headline_sentence,
    learning_rate_note,
    mode_sentences,
)

SCALING_DEFINITIONS = definitions(
    TERMS, POINT_FIGURES, PART_FIGURES, SCALING_TERMS, SPLIT_TERMS.values(), RANK_BYTES_FIGURES, OPERATION_FIGURES
)
"""Definitions on the page, by key."""
CURVES_CAPTION = "Dashed lines: ideal scaling. Thin vertical lines: 95% intervals over repeats."
SPLIT_CAPTION = (
    "Numbers after the bars: time of the whole step. Numbers inside: share of it. Means over ranks and repeats."
)


@dataclass(frozen=True)
class ModeSection:
    """Section of the page on strong or on weak scaling."""

    mode: Mode
    title: str
    lede: str
    sentences: list[str]
    table: PageTable
    caption: str
    split_table: PageTable
    """Time split of the points that recorded events."""


def write_scaling_page(scaling: Scaling, path: Path) -> None:
    """Write the page atomically."""
    write_document(render_scaling(scaling), path)


def render_scaling(scaling: Scaling) -> str:
    """Return the whole page as HTML."""
    return render_document("scale.html", _context(scaling), scaling_plots(scaling), [])


def scaling_plots(scaling: Scaling) -> dict[str, Json]:
    """Return every plot that has data to show, by name."""
    drawn = {f"{mode}-curves": curves_figure(scaling, mode) for mode in scaling.modes}
    drawn |= {f"{mode}-split": split_figure(scaling, mode) for mode in scaling.modes}
    drawn["link"] = link(scaling.comparison)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _context(scaling: Scaling) -> dict[str, Any]:
    """Return the data that the template shows."""
    comparison, tints = scaling.comparison, strategy_colours(scaling)
    names = {candidate.name: candidate.strategy for candidate in scaling.record_set.candidates}
    largest = _largest_payload(scaling)
    return {
        **header_context(comparison, headline_sentence(scaling)),
        **machine_context(comparison),
        **payload_context(largest.payloads, "Strategy"),
        "payload_where": largest.ranks,
        "facts": _facts(scaling),
        "sentences": [
            *[f"{TITLES[mode]}: {format_mode(scaling, mode)}" for mode in scaling.modes],
            *closing_sentences(scaling),
        ],
        "notes": [*scaling.warnings, learning_rate_note(scaling)],
        "modes": [_mode(scaling, mode) for mode in scaling.modes],
        "by_strategy": True,
        "colours": tints | {name: tints[strategy] for name, strategy in names.items()},
        "part_colours": PART_COLOURS,
        "definitions": SCALING_DEFINITIONS,
        "best": best.candidate.name if (best := _best(scaling)) is not None else None,
        "next_command": None,
        "split_caption": SPLIT_CAPTION,
    }


def _best(scaling: Scaling) -> ScalingPoint | None:
    return next((point for mode in scaling.modes if (point := scaling.best(mode)) is not None), None)


@dataclass(frozen=True)
class LargestPayload:
    """Bytes counted at the sockets, at the points with the most ranks."""

    payloads: dict[str, Payload]
    """Payloads by strategy."""
    ranks: str
    """Number of ranks and hosts of these points, formatted."""


def _largest_payload(scaling: Scaling) -> LargestPayload:
    """Return one point of each strategy with the most ranks and hosts; the bytes sent do not depend on the batch."""
    points = [point for mode in scaling.modes for point in scaling.points(mode)]
    known = [point for point in points if point.candidate.name in scaling.comparison.payloads]
    most = max(((point.ranks, point.hosts) for point in known), default=(0, 0))
    chosen = {point.strategy: point for point in reversed(known) if (point.ranks, point.hosts) == most}
    payloads = {
        strategy: scaling.comparison.payloads[chosen[strategy].candidate.name]
        for strategy in dict.fromkeys(point.strategy for point in points)
        if strategy in chosen
    }
    hosts = f" over {plural(most[1], 'host')}" if most[1] > 1 else ""
    return LargestPayload(payloads, f"{plural(most[0], 'rank')}{hosts}")


def _mode(scaling: Scaling, mode: Mode) -> ModeSection:
    points = scaling.points(mode)
    hollow = " Hollow points: ranks without a core each." if any(p.oversubscribed for p in points) else ""
    dotted = " Dotted curves: several ranks on a host." if _has_several_per_host(scaling, mode) else ""
    kind = format_mode(scaling, mode)
    caption = CURVES_CAPTION if any(point.row.repeats > 1 for point in points) else "Dashed lines: ideal scaling."
    split = [point for point in points if point.row.split is not None and point.row.is_measured]
    return ModeSection(
        mode=mode,
        title=TITLES[mode],
        lede=kind[0].upper() + kind[1:],
        sentences=mode_sentences(scaling, mode),
        table=_point_table(mode, points),
        caption=f"{caption} Dotted horizontal line: one process.{dotted}{hollow}",
        split_table=_part_table(mode, split),
    )


def _point_table(mode: Mode, points: Sequence[ScalingPoint]) -> PageTable:
    return PageTable(
        f"{mode}-points",
        f"Table of {TITLES[mode].lower()}",
        "Strategy",
        [_point_row(point) for point in points],
        page_columns(POINT_FIGURES, points),
        classes="grouped wide",
    )


def _part_table(mode: Mode, points: Sequence[ScalingPoint]) -> PageTable:
    return PageTable(
        f"{mode}-parts",
        f"Computation and communication of {TITLES[mode].lower()}",
        "Strategy",
        [PageRow(point.strategy, classes=point.candidate.role) for point in points],
        page_columns((*SHAPE_FIGURES, *PART_FIGURES), points),
        classes="grouped",
    )


def _point_row(point: ScalingPoint) -> PageRow:
    is_pale = point.row.step_s is None or bool(point.oversubscribed)
    classes = f"{point.candidate.role} unmeasured" if is_pale else point.candidate.role
    return PageRow(point.strategy, (), classes, outcome(point.row), "bad")


def _has_several_per_host(scaling: Scaling, mode: Mode) -> bool:
    return any((curve.ranks_per_host or 1) > 1 for curve in scaling.in_mode(mode))


def _facts(scaling: Scaling) -> list[str]:
    """Return what was measured, on which hardware, how often and when."""
    points = [point for mode in scaling.modes for point in scaling.points(mode)]
    ranks = sorted({point.ranks for point in points})
    strategies = len({point.strategy for point in points if point.candidate.role != "baseline"})
    return [
        f"{' and '.join(scaling.modes)} scaling",
        f"{strategies} strategies" if strategies != 1 else "1 strategy",
        f"{join_names([str(number) for number in ranks])} ranks" if ranks != [1] else "1 rank",
        format_hosts_used(scaling),
        *run_facts(scaling.record_set),
    ]

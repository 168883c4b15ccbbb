"""HTML report of an experiment over batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.batch.points import BatchPoint, BatchSizes
from paceline.analysis.statistics import MIN_REPEATS
from paceline.formatting import join_names
from paceline.report.batch_verdict import (
    alternative_sentences,
    closing_sentences,
    curve_sentences,
    format_curve,
    format_facts_of_sizes,
    headline_sentence,
    length_phrase,
    next_command,
    point_outcome,
)
from paceline.report.definitions import COMPARISON_TERMS, SCALING_TERMS, SPLIT_TERMS, TERMS
from paceline.report.figures.batch import BATCH_FIGURES, BATCH_TABLES, SIZE_FIGURES
from paceline.report.figures.columns import page_columns
from paceline.report.figures.figure import definitions
from paceline.report.page.document import (
    render_document,
    write_document,
)
from paceline.report.page.header import header_context, legend_of, run_facts
from paceline.report.page.sections import machine_context
from paceline.report.page.tables import PageRow, PageTable
from paceline.report.plots.batch import (
    COMMUNICATION_PANELS,
    RESOURCE_PANELS,
    TIME_PANELS,
    TRAINING_PANELS,
    curve_colours,
    epoch_split_figure,
    panels_figure,
)
from paceline.report.plots.drawing import Json
from paceline.report.plots.link import link
from paceline.report.plots.losses import losses
from paceline.report.plots.noise_scale import noise_scales
from paceline.report.plots.palette import PARTS as PART_COLOURS
from paceline.report.plots.validation import validation
from paceline.report.terminal.batch import epoch_headings

BATCH_DEFINITIONS = definitions(
    TERMS,
    BATCH_FIGURES,
    SPLIT_TERMS.values(),
    [term for term in SCALING_TERMS if term.key == "oversubscribed"],
    [term for term in COMPARISON_TERMS if term.key == "wall"],
)
"""Definitions on the page, by key."""
INTERVALS = "Thin vertical lines: 95% intervals over repeats."
HOLLOW = " Hollow points: ranks without a core each."
SPLIT_CAPTION = (
    "Numbers after the bars: time of the whole epoch. Numbers inside: share of it. Means over ranks and repeats."
)


@dataclass(frozen=True)
class BatchSection:
    """Section of the page on one table."""

    name: str
    title: str
    link: str
    """Name in the navigation, which has room for a few words of each section."""
    lede: str
    table: PageTable


def write_batch_page(found: BatchSizes, path: Path) -> None:
    """Write the page atomically."""
    write_document(render_batch_sizes(found), path)


def render_batch_sizes(found: BatchSizes) -> str:
    """Return the whole page as HTML."""
    return render_document("batch.html", _context(found), batch_plots(found), legend_of(found.record_set))


def batch_plots(found: BatchSizes) -> dict[str, Json]:
    """Return every plot that has data to show, by name."""
    drawn = {
        "time": panels_figure(found, "Time and throughput over batch sizes", TIME_PANELS),
        "communication": panels_figure(found, "Computation and communication over batch sizes", COMMUNICATION_PANELS),
        "split": epoch_split_figure(found),
        "resources": panels_figure(found, "Memory and processors over batch sizes", RESOURCE_PANELS),
        "training": panels_figure(found, "Loss and accuracy over batch sizes", TRAINING_PANELS),
        "losses": losses(found.comparison),
        "noise": noise_scales(found.comparison),
        "validation": validation(found.comparison),
        "link": link(found.comparison),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _context(found: BatchSizes) -> dict[str, Any]:
    """Return the data that the template shows."""
    comparison, tints = found.comparison, curve_colours(found)
    best = next((format_curve(curve) for curve in found.curves if found.best in curve.points), None)
    names = {point.candidate.name: format_curve(curve) for curve in found.curves for point in curve.points}
    return {
        **header_context(comparison, headline_sentence(found)),
        **machine_context(comparison),
        "facts": _facts(found),
        "sentences": [*alternative_sentences(found), *curve_sentences(found), *closing_sentences(found)],
        "notes": found.warnings,
        "sections": _sections(found),
        "by_strategy": True,
        "colours": tints | {name: tints[curve] for name, curve in names.items()},
        "part_colours": PART_COLOURS,
        "definitions": BATCH_DEFINITIONS,
        "best": best,
        "next_command": next_command(found),
        "caption": _caption(found),
        "split_caption": SPLIT_CAPTION,
    }


def _caption(found: BatchSizes) -> str:
    intervals = (
        INTERVALS
        if any(point.row.repeats >= MIN_REPEATS for point in found.points)
        else "One line per number of ranks."
    )
    return intervals + (HOLLOW if any(point.oversubscribed for point in found.points) else "")


LEDES = {
    "time": (
        "Time and throughput",
        "Time",
        "One epoch is one pass over the training data. Its time is given with data loading, and without it.",
    ),
    "communication": (
        "Computation and communication",
        "Communication",
        "Seconds of an epoch in which a rank computes and in which communication is in progress; both at once count in "
        "both.",
    ),
    "resources": (
        "Memory and processors",
        "Memory and processors",
        "Memory of the rank that needs most, the cores that all ranks keep busy, and the share of the processors' peak "
        "that the model uses.",
    ),
    "training": (
        "Loss and accuracy",
        "Loss and accuracy",
        "At equal time, every run is compared when the first run of its repeat ended.",
    ),
}
"""Title, name in the navigation and introduction of each section."""


def _sections(found: BatchSizes) -> list[BatchSection]:
    """Return the sections whose tables have figures."""
    return [
        BatchSection(name, title, link, _at_the_end(found, name) + lede, _table(found, name))
        for name, (title, link, lede) in LEDES.items()
        if not all(column.is_empty for column in page_columns(BATCH_TABLES[name], found.points))
    ]


def _at_the_end(found: BatchSizes, name: str) -> str:
    has_equal_epochs = name == "training" and length_phrase(found) == "at equal epochs"
    return "At equal epochs, larger batches make fewer steps. " if has_equal_epochs else ""


def _table(found: BatchSizes, name: str) -> PageTable:
    figures = (*SIZE_FIGURES, *BATCH_TABLES[name])
    return PageTable(
        f"batch-{name}",
        f"Table: {LEDES[name][0].lower()}",
        "Strategy and ranks",
        [_row(format_curve(curve), point) for curve in found.curves for point in curve.points],
        page_columns(figures, found.points, epoch_headings(found, short=False)),
        classes="grouped wide",
    )


def _row(name: str, point: BatchPoint) -> PageRow:
    is_pale = not point.row.is_measured or bool(point.oversubscribed)
    return PageRow(name, (), f"{point.candidate.role}{' unmeasured' if is_pale else ''}", point_outcome(point), "bad")


def _facts(found: BatchSizes) -> list[str]:
    """Return what was measured, on which hardware, how often and when."""
    ranks = sorted({point.ranks for point in found.points})
    return [
        format_facts_of_sizes(found),
        f"{join_names([str(number) for number in ranks])} ranks" if ranks != [1] else "1 rank",
        *run_facts(found.record_set, with_steps=False),
    ]

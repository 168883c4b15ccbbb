"""HTML report of an experiment with large batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.analysis.large_batch.results import LargeBatches, LargeBatchRow
from paceline.errors import DivergenceError
from paceline.formatting import whole
from paceline.report.definitions import BATCH_TERM, COMPARISON_TERMS, REMEDIES_TERM, SEED_TERM, TERMS
from paceline.report.figures.columns import page_columns
from paceline.report.figures.figure import definitions
from paceline.report.figures.large_batch import LARGE_BATCH_FIGURES
from paceline.report.large_batch_verdict import facts, remedy_notes, row_outcome, sentences
from paceline.report.page.document import render_document, write_document
from paceline.report.page.header import header_context, legend_of, run_facts
from paceline.report.page.tables import PageRow, PageTable, RowLabel
from paceline.report.plots.drawing import Json
from paceline.report.plots.large_batch import large_batch_figure
from paceline.report.plots.losses import losses
from paceline.report.plots.noise_scale import noise_scales
from paceline.report.plots.palette import PARTS as PART_COLOURS
from paceline.report.plots.palette import colours
from paceline.report.plots.validation import validation
from paceline.report.terminal.large_batch import warnings

LARGE_BATCH_DEFINITIONS = definitions(
    [REMEDIES_TERM, BATCH_TERM, SEED_TERM],
    [term for term in TERMS if term.key in ("interval", "rank")],
    LARGE_BATCH_FIGURES,
    [term for term in COMPARISON_TERMS if term.key == "wall"],
)
"""Definitions on the page, by key."""
CAPTION = (
    "Diamond and dashed lines: the reference. Thin horizontal lines: 95% intervals over seeds. The training loss is "
    "that over the last epoch."
)


def write_large_batch_page(found: LargeBatches, path: Path) -> None:
    """Write the page atomically."""
    write_document(render_large_batches(found), path)


def render_large_batches(found: LargeBatches) -> str:
    """Return the whole page as HTML."""
    return render_document("large_batch.html", _context(found), large_batch_plots(found), legend_of(found.record_set))


def large_batch_plots(found: LargeBatches) -> dict[str, Json]:
    """Return every plot that has data to show, by name."""
    drawn = {
        "results": large_batch_figure(found),
        "losses": losses(found.comparison),
        "validation": validation(found.comparison),
        "noise": noise_scales(found.comparison),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _context(found: LargeBatches) -> dict[str, Any]:
    """Return the data that the template shows."""
    verdict, *others = sentences(found)
    header = header_context(found.comparison, verdict)
    best = found.best(max(found.by_size, default=0))
    return {
        **header,
        # A divergence is a result, which the table shows.
        "failures": [event for event in header["failures"] if event.kind != DivergenceError.__name__],
        "facts": [*facts(found), *run_facts(found.record_set, with_steps=False, noun="seed")],
        "sentences": others,
        "notes": warnings(found),
        "remedies": remedy_notes(found),
        "table": _table(found),
        "caption": CAPTION,
        "colours": colours(found.record_set.candidates),
        "part_colours": PART_COLOURS,
        "definitions": LARGE_BATCH_DEFINITIONS,
        "best": best and best.row.candidate.name,
        "next_command": None,
    }


def _table(found: LargeBatches) -> PageTable:
    return PageTable(
        "large-batch",
        "Table of batches and remedies",
        REMEDIES_TERM.term,
        [_row(row) for row in found.rows],
        page_columns(LARGE_BATCH_FIGURES, found.rows),
        REMEDIES_TERM.key,
        classes="wide",
    )


def _row(row: LargeBatchRow) -> PageRow:
    classes = "unmeasured" if row.accuracy is None else row.row.candidate.role
    label = RowLabel("Batch", BATCH_TERM.key, whole(row.batch))
    return PageRow(row.row.candidate.name, (label,), classes, row_outcome(row), "bad")

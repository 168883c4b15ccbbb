"""HTML report of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.formatting import NOTHING, plural, whole
from paceline.report.definitions import COMPARISON_TERMS, SPLIT_TERMS, TERMS
from paceline.report.evidence import loss_difference_row, loss_difference_sentences
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import page_columns
from paceline.report.figures.figure import definitions
from paceline.report.figures.machine import HOST_FIGURES, OPERATOR_FIGURES
from paceline.report.figures.ranks import RANK_FIGURES
from paceline.report.figures.steps import BYTES_FIGURES, OPERATION_FIGURES, RANK_BYTES_FIGURES, SPLIT_FIGURES
from paceline.report.page.document import (
    render_document,
    write_document,
)
from paceline.report.page.header import header_context, legend_of, run_facts
from paceline.report.page.sections import machine_context, name_heading, resource_context, step_context
from paceline.report.page.tables import PageRow, PageTable, rank_label
from paceline.report.plots.bars import bars
from paceline.report.plots.drawing import Json, shortened
from paceline.report.plots.link import link
from paceline.report.plots.loss_differences import loss_differences
from paceline.report.plots.losses import losses
from paceline.report.plots.noise_scale import noise_scales
from paceline.report.plots.palette import colours
from paceline.report.plots.resources import resources
from paceline.report.plots.split import split
from paceline.report.plots.step_times import step_time_plot
from paceline.report.plots.timeline import timeline
from paceline.report.plots.validation import validation
from paceline.report.run_description import compares_strategies, on_hosts, outcome
from paceline.report.verdict.headline import REMARKS, remark_on
from paceline.report.verdict.next_command import next_command
from paceline.report.verdict.sentences import sentences

PLOTS = {
    "split": split,
    "timeline": timeline,
    "link": link,
    "resources": resources,
    "bars": bars,
    "losses": losses,
    "validation": validation,
    "noise": noise_scales,
    "times": step_time_plot,
    "loss_differences": loss_differences,
}
"""Functions that draw the plots of the page, in the order of the page."""
DEFINITIONS = definitions(
    TERMS,
    CANDIDATE_FIGURES,
    SPLIT_TERMS.values(),
    RANK_FIGURES,
    SPLIT_FIGURES,
    BYTES_FIGURES,
    RANK_BYTES_FIGURES,
    OPERATION_FIGURES,
    HOST_FIGURES,
    OPERATOR_FIGURES,
    COMPARISON_TERMS,
)
"""Definitions on the page, by key."""
TAG_CLASSES = {"pick": "good", REMARKS["diverged"]: "bad", REMARKS["replicas_differ"]: "bad"}
"""Style of the label beside a candidate's name; others are neutral."""
LONGEST_REFERENCE = 18
"""Longest name of the reference that fits into a heading."""


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page atomically."""
    write_document(render(comparison), path)


def render(comparison: Comparison) -> str:
    """Return the whole page as HTML."""
    context = _context(comparison) | step_context(comparison)
    context |= machine_context(comparison) | resource_context(comparison)
    return render_document("page.html", context, all_plots(comparison), legend_of(comparison.record_set))


def all_plots(comparison: Comparison) -> dict[str, Json]:
    """Return every plot that has data to show, by name."""
    drawn = {name: draw(comparison) for name, draw in PLOTS.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _context(comparison: Comparison) -> dict[str, Any]:
    """Return the data that the template shows."""
    record_set = comparison.record_set
    verdict = sentences(comparison)
    return {
        **header_context(comparison, verdict[0]),
        "facts": _facts(comparison),
        "sentences": verdict[1:],
        "notes": comparison.warnings,
        "best": comparison.pick,
        "next_command": next_command(comparison),
        "colours": colours(record_set.candidates),
        "by_strategy": compares_strategies(comparison),
        "comparison_table": comparison_table(comparison),
        "rank_table": rank_table(comparison),
        "loss_differences": [loss_difference_row(loss_difference) for loss_difference in comparison.loss_differences],
        "loss_difference_sentences": list(loss_difference_sentences(comparison)),
        "definitions": DEFINITIONS,
        "has_pale": bool(comparison.with_role("bound") or comparison.with_role("baseline")),
        "has_small_batches": _has_small_batches(comparison),
        "shortened": shortened,
    }


def comparison_table(comparison: Comparison) -> PageTable:
    """Return the table of candidates, fastest first."""
    reference = f"÷ {shortened(comparison.reference or NOTHING, LONGEST_REFERENCE)}"
    return PageTable(
        "comparison",
        "Comparison table",
        name_heading(comparison),
        [_candidate_row(comparison, row) for row in comparison.rows],
        page_columns(CANDIDATE_FIGURES, comparison.rows, {"ratio": reference}),
        classes="wide",
    )


def _candidate_row(comparison: Comparison, row: CandidateRow) -> PageRow:
    name, tag = row.candidate.name, _tag(comparison, row)
    is_best = name == (comparison.pick or (comparison.decision.first if comparison.computes_same else None))
    classes = [row.candidate.role, "best" * is_best, "unmeasured" * (row.step_s is None)]
    tag_class = "bad" if outcome(row) else TAG_CLASSES.get(tag, "")
    return PageRow(name, (), " ".join(filter(None, classes)), tag, tag_class)


def rank_table(comparison: Comparison) -> PageTable:
    """Return the table of the ranks of every candidate."""
    rows = [(row.candidate.name, rank) for row in comparison.rows for rank in row.ranks]
    return PageTable(
        "by-rank",
        "Table of ranks",
        name_heading(comparison),
        [PageRow(name, (rank_label(rank.rank),)) for name, rank in rows],
        page_columns(RANK_FIGURES, [rank for _, rank in rows]),
        classes="grouped wide",
        is_tall=True,
    )


def _facts(comparison: Comparison) -> list[str]:
    """Return what was compared, on which hardware, how often and when, without what is unknown."""
    record_set = comparison.record_set
    topologies = [entry.run.topology for entry in record_set.runs]
    ranks = {d.ranks for d in record_set.designs} or {t.world_size for t in topologies}
    batches = {row.batch for row in comparison.rows if row.batch}
    hosts = on_hosts(record_set.designs[0]) if record_set.designs else ""
    return [
        _count_rows(comparison),
        *[plural(n, "rank") + hosts for n in sorted(ranks)][:1],
        *([f"global batch {whole(batches.pop())}"] if len(batches) == 1 else []),
        *run_facts(record_set),
    ]


def _count_rows(comparison: Comparison) -> str:
    count = len(comparison.rows)
    if not compares_strategies(comparison):
        return plural(count, "setting")
    return "1 strategy" if count == 1 else f"{count} strategies"


def _tag(comparison: Comparison, row: CandidateRow) -> str:
    """Return the label beside a candidate's name in the table."""
    decision, name = comparison.decision, row.candidate.name
    if outcome(row):
        return outcome(row)
    if name == comparison.pick:
        return "pick"
    better = comparison.better_learned
    if better is not None and name == better.best:
        return "more accurate" if better.measure == "accuracy" else "lower test loss"
    if better is not None and name == decision.first:
        return "fastest"
    if row.candidate.role != "candidate":
        return row.candidate.role
    if decision.outcome == "equal" and name in (decision.first, decision.second):
        return "equally fast"
    return remark_on(row)


def _has_small_batches(comparison: Comparison) -> bool:
    """Return whether some steps have so few samples that their times show it."""
    samples = [
        steps["samples"] for entry in comparison.record_set.runs for steps in entry.run.steps.values() if len(steps)
    ]
    return any(float(column.min()) < 0.9 * float(column.max()) for column in samples)

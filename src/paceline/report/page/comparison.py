"""A comparison as one HTML file that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.report.definitions import DEFINITIONS
from paceline.report.evidence import loss_difference_row, loss_difference_sentences, proof_verdict, scientific
from paceline.report.formatting import on_hosts, plural
from paceline.report.page.document import (
    date_in_words,
    origin_context,
    render_document,
    split_headline,
    workload_in_words,
    write_document,
)
from paceline.report.page.sections import machine_context, step_context
from paceline.report.plots.all_plots import all_plots
from paceline.report.plots.drawing import short_names, shortened
from paceline.report.plots.palette import colours
from paceline.report.tables.columns import comparison_columns, rank_columns
from paceline.report.verdict import next_command, sentences


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes the page; it is there in full or not at all."""
    write_document(render(comparison), path)


def render(comparison: Comparison) -> str:
    """The whole page as text."""
    context = {**_context(comparison), **step_context(comparison), **machine_context(comparison)}
    return render_document("page.html", context, all_plots(comparison), _legend(comparison))


def _legend(comparison: Comparison) -> list[dict[str, str]]:
    """Name, label and colour of every candidate, in the order in which they were named."""
    labels = short_names([candidate.name for candidate in comparison.record_set.candidates], 32)
    tints = colours(comparison.record_set.candidates)
    return [{"name": name, "label": labels[name], "colour": tint} for name, tint in tints.items()]


def _context(comparison: Comparison) -> dict[str, Any]:
    """Everything the template shows, as text."""
    record_set = comparison.record_set
    verdict = sentences(comparison)
    headline, lead = split_headline(verdict[0])
    return {
        "comparison": comparison,
        "title": workload_in_words(record_set),
        "facts": _facts(comparison),
        "headline": headline,
        "lead": lead,
        "sentences": verdict[1:],
        "notes": comparison.warnings,
        "failures": [event for event in record_set.events if event["event"] == "failure"],
        "next_command": next_command(comparison),
        "colours": colours(record_set.candidates),
        "by_strategy": _by_strategy(comparison),
        "tags": {row.candidate.name: _tag(comparison, row) for row in comparison.rows},
        "best": comparison.pick or comparison.decision.first,
        "columns": comparison_columns(comparison.rows, comparison.reference),
        "rank_rows": [(row, rank) for row in comparison.rows for rank in row.ranks],
        "rank_columns": rank_columns([rank for row in comparison.rows for rank in row.ranks]),
        "proof_verdict": proof_verdict,
        "scientific": scientific,
        "loss_differences": [loss_difference_row(loss_difference) for loss_difference in comparison.loss_differences],
        "parting_sentences": list(loss_difference_sentences(comparison)),
        **origin_context(record_set),
        "definitions": DEFINITIONS,
        "repeats": max((row.repeats for row in comparison.rows), default=0),
        "has_pale": bool(comparison.with_role("bound") or comparison.with_role("baseline")),
        "has_small_batches": _has_small_batches(comparison),
        "shortened": shortened,
    }


def _facts(comparison: Comparison) -> list[str]:
    """What was compared, on what, how often, and when: what is not known is left out."""
    record_set = comparison.record_set
    topologies = [entry.run.topology for entry in record_set.runs]
    ranks = {d["ranks"] for d in record_set.designs} or {t["world_size"] for t in topologies}
    batches = {row.batch for row in comparison.rows if row.batch}
    devices = {f"{t['device']} ({t['backend']})" for t in topologies if t.get("exchanges")}
    repeats = len({entry.repeat for entry in record_set.runs})
    steps = {(entry.run.summary or {}).get("steps") for entry in record_set.runs} - {None}
    return [
        _several(len(comparison.rows), "strategy" if _by_strategy(comparison) else "setting"),
        *[plural(n, "rank") + on_hosts(record_set.designs[0] if record_set.designs else {}) for n in sorted(ranks)][:1],
        *([f"global batch {batches.pop():,}"] if len(batches) == 1 else []),
        *([devices.pop()] if len(devices) == 1 else []),
        *([plural(int(steps.pop() or 0), "step")] if len(steps) == 1 else []),
        plural(repeats, "repeat"),
        *[when for p in record_set.provenances[:1] if (when := date_in_words(p.get("time")))],
    ]


def _several(count: int, noun: str) -> str:
    return f"{count} strategies" if noun == "strategy" and count != 1 else plural(count, noun)


def _by_strategy(comparison: Comparison) -> bool:
    candidates = comparison.record_set.candidates
    return len({candidate.strategy for candidate in candidates}) > 1 or not any(c.settings for c in candidates)


def _tag(comparison: Comparison, row: CandidateRow) -> str:
    """The word beside a name in the table."""
    decision, name = comparison.decision, row.candidate.name
    if row.failure:
        return "failed"
    if name == comparison.pick:
        return "pick"
    if row.candidate.role != "candidate":
        return row.candidate.role
    return "equally fast" if decision.outcome == "equal" and name in (decision.first, decision.second) else ""


def _has_small_batches(comparison: Comparison) -> bool:
    """Whether steps differ in samples enough for their times to show it."""
    samples = [
        steps["samples"] for entry in comparison.record_set.runs for steps in entry.run.steps.values() if len(steps)
    ]
    return any(float(column.min()) < 0.9 * float(column.max()) for column in samples)

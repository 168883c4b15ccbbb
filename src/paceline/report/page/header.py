"""Parts that the pages of all experiments share: the headline, facts about the runs, and the legend of the plots."""

from __future__ import annotations

from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.record_set import RecordSet
from paceline.formatting import plural, scientific
from paceline.records.events import FailureEvent, events_of
from paceline.report.evidence import proof_verdict
from paceline.report.page.document import format_date, provenance_context, split_headline, workload_name
from paceline.report.plots.drawing import short_names
from paceline.report.plots.palette import colours

LONGEST_LABEL = 32


def header_context(comparison: Comparison, verdict: str) -> dict[str, Any]:
    """Return the data that all templates show: title, headline, failures, proofs and provenance.

    `verdict` is the first sentence of the verdict.
    """
    headline, lead = split_headline(verdict)
    return {
        **provenance_context(comparison.record_set),
        "comparison": comparison,
        "title": workload_name(comparison.record_set),
        "headline": headline,
        "lead": lead,
        "failures": events_of(comparison.record_set.events, FailureEvent),
        "proof_verdict": proof_verdict,
        "scientific": scientific,
        "repeats": max((row.repeats for row in comparison.rows), default=0),
    }


def run_facts(record_set: RecordSet, *, with_steps: bool = True, noun: str = "repeat") -> list[str]:
    """Return facts about the runs: devices and steps, if all have the same, repeats and time.

    `noun` is the word for a repeat.
    """
    topologies = [entry.run.topology for entry in record_set.runs]
    devices = {f"{topology.device} ({topology.backend})" for topology in topologies if topology.exchanges}
    steps = {entry.run.summary.steps for entry in record_set.runs if entry.run.summary} if with_steps else set()
    return [
        *([devices.pop()] if len(devices) == 1 else []),
        *([plural(steps.pop(), "step")] if len(steps) == 1 else []),
        plural(len({entry.repeat for entry in record_set.runs}), noun),
        *[when for one in record_set.provenances[:1] if (when := format_date(one.time))],
    ]


def legend_of(record_set: RecordSet) -> list[dict[str, str]]:
    """Return name, label and colour of every candidate, in the order of the record."""
    labels = short_names([candidate.name for candidate in record_set.candidates], LONGEST_LABEL)
    tints = colours(record_set.candidates)
    return [{"name": name, "label": labels[name], "colour": tint} for name, tint in tints.items()]

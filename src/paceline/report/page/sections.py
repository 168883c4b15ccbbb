"""Data of the page's sections on the step: bottlenecks, time split, traffic, the machine and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.timing import includes_warm_up
from paceline.report.explanations import PART, Reason, anchor, explain
from paceline.report.formatting import WARM_UP_COUNTS, join_names, percent, seconds
from paceline.report.plots import resources as figure_resources
from paceline.report.plots.palette import PARTS as COLOURS
from paceline.report.plots.split import NAMES
from paceline.report.plots.timeline_steps import MOST_RANKS
from paceline.report.tables.columns import PageColumn
from paceline.report.tables.payload import payload_context
from paceline.report.tables.profile import ProfileRow, profile_columns, profile_rows, profile_sentences
from paceline.report.tables.resources import host_columns, host_rows, sampling_share
from paceline.report.tables.steps import (
    BytesRow,
    bytes_columns,
    bytes_rows,
    operation_columns,
    operation_rows,
    rank_split_rows,
    shared_memory_sentences,
    split_columns,
    split_rows,
)
from paceline.report.terminal.doctor import FindingRow, finding_rows

SPLIT_PART = {"descheduled": "compute", "data": "other", "wait_s": "exposed"}
"""Part of the time split, which has a colour, that a finer part belongs to."""


@dataclass(frozen=True)
class ReasonSection:
    """Reason as the page shows it; the amount is a link to the table cell that supports it."""

    amount: str
    rest: str
    remedy: str
    anchor: str
    share: float
    part: str


@dataclass(frozen=True)
class ProfileSection:
    """Table of operators of a candidate."""

    candidate: str
    sentences: list[str]
    rows: list[ProfileRow]
    columns: list[PageColumn]


def step_context(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the sections on the step; lists are empty where nothing was measured."""
    splits, ranks = split_rows(comparison), rank_split_rows(comparison)
    sizes, operations = bytes_rows(comparison), operation_rows(comparison)
    return {
        "reasons": _reasons(comparison),
        "anchor": partial(anchor, comparison),
        "part_colours": COLOURS,
        "split_names": list(NAMES.items()),
        "split_rows": splits,
        "split_columns": split_columns(splits),
        "includes_warm_up": any(includes_warm_up(entry.run) for entry in comparison.record_set.runs),
        "warm_up_note": WARM_UP_COUNTS,
        "rank_split_rows": ranks,
        "rank_split_columns": split_columns(ranks),
        "many_ranks": any(len(row.ranks) > MOST_RANKS for row in comparison.rows),
        "bytes_rows": sizes,
        "bytes_columns": bytes_columns(sizes),
        "content_sentence": _content_sentence(sizes),
        "shared_memory_sentences": shared_memory_sentences(comparison),
        **payload_context(comparison.payloads),
        "operation_rows": operations,
        "operation_columns": operation_columns(operations),
        "has_utilisation": any(row.utilisation is not None for row in operations),
    }


def machine_context(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the sections on the machine, the link, resources and operators."""
    hosts = host_rows(comparison)
    return {
        "findings": _findings(comparison),
        "measuring_cost": _measuring_cost(comparison),
        "link_caption": "Bus bandwidth (busbw) of all-reduces, by size. Dashed lines: bandwidth between two ranks.",
        "resources_lede": figure_resources.LEDE,
        "resources_caption": figure_resources.CAPTION,
        "host_rows": hosts,
        "host_columns": host_columns(hosts),
        "profiles": _profiles(comparison),
    }


def _reasons(comparison: Comparison) -> list[tuple[str, list[ReasonSection]]]:
    """Return the reasons by candidate, in the order of the table."""
    grouped = groupby(explain(comparison), key=lambda reason: reason.candidate)
    return [(candidate, [_reason_section(reason) for reason in own]) for candidate, own in grouped]


def _reason_section(reason: Reason) -> ReasonSection:
    """Split a reason after its amount, which ends with a bracket; without one the whole text becomes the link."""
    amount, bracket, rest = reason.text.partition(")")
    part = PART[reason.kind]
    own = (amount + bracket, rest) if bracket else (reason.text, "")
    return ReasonSection(*own, reason.remedy, reason.anchor, reason.share, SPLIT_PART.get(part, part))


def _content_sentence(rows: Sequence[BytesRow]) -> str:
    """Return a sentence on the content of the tensors that are sent."""
    kinds = {"gradients": "gradients", "buffers": "BatchNorm buffers", "statistics": "BatchNorm statistics"}
    kinds |= {"weights": "weights", "control": "control messages"}
    found = [name for kind, name in kinds.items() if any(getattr(row, kind) for row in rows)]
    if not found:
        return ""
    return f"Ranks send {join_names(found)}, and nothing else."


def _findings(comparison: Comparison) -> list[tuple[bool, list[FindingRow]]]:
    """Return the problems and notes, then the passed checks; each list with whether its checks passed."""
    if comparison.examination is None:
        return []
    grouped = groupby(finding_rows(comparison.examination), key=lambda finding: finding.level == "ok")
    return [(passed, list(own)) for passed, own in grouped]


def _measuring_cost(comparison: Comparison) -> list[str]:
    """Return sentences on the cost of collecting events and of sampling."""
    found = []
    cost = comparison.examination.measuring_cost if comparison.examination is not None else None
    if cost is not None:
        interval = f"{percent(cost.low)} to {percent(cost.high)}"
        share = f"{percent(cost.share)} of the CPU time of a step (95% interval {interval})"
        amount = f"has no measurable cost: {share}" if cost.low <= 0 <= cost.high else f"costs {share}"
        found.append(
            f"Collecting events {amount}, measured on {cost.workload} under {cost.strategy}: "
            f"{seconds(cost.step_cpu_s)} per step without events."
        )
    sampling = sampling_share(comparison)
    if sampling is not None:
        found.append(f"Sampling CPU and memory used at most {percent(sampling, 2)} of a core.")
    return found


def _profiles(comparison: Comparison) -> list[ProfileSection]:
    """Return the operators of the first profiled run of every candidate."""
    found = []
    for row in comparison.rows:
        runs = comparison.record_set.runs_of(row.candidate.name)
        run = next((runs[repeat] for repeat in sorted(runs) if runs[repeat].profiles), None)
        rows = [] if run is None else profile_rows(run)
        if run is not None and rows:
            found.append(ProfileSection(row.candidate.name, list(profile_sentences(run)), rows, profile_columns(rows)))
    return found

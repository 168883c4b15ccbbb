"""Data of the page's sections on the step: bottlenecks, time split, traffic, the machine and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.timing import includes_warm_up
from paceline.analysis.traffic.payload import Payload
from paceline.formatting import join_names, percent, seconds
from paceline.report.explanations import PART, Reason, anchor, explain
from paceline.report.figures.columns import page_columns
from paceline.report.figures.machine import HOST_FIGURES, OPERATOR_FIGURES
from paceline.report.figures.steps import BYTES_FIGURES, OPERATION_FIGURES, RANK_BYTES_FIGURES, SPLIT_FIGURES
from paceline.report.page.tables import PageRow, PageTable, RowLabel, rank_label
from paceline.report.plots import resources as figure_resources
from paceline.report.plots.palette import PARTS as COLOURS
from paceline.report.plots.split import NAMES
from paceline.report.plots.timeline_steps import MOST_RANKS
from paceline.report.run_description import WARM_UP_COUNTS, compares_strategies
from paceline.report.tables.payload import matrices, rank_bytes_rows
from paceline.report.tables.profile import ProfileRow, profile_rows, profile_sentences
from paceline.report.tables.resources import comparing_replicas_share, host_rows, profiled_runs, sampling_share
from paceline.report.tables.steps import (
    BytesRow,
    OperationRow,
    SplitRow,
    bytes_rows,
    operation_rows,
    rank_split_rows,
    shared_memory_sentences,
    split_rows,
)
from paceline.report.terminal.doctor import FindingRow, finding_rows

SPLIT_PART = {"descheduled": "compute", "data": "other", "wait": "exposed"}
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
    table: PageTable


def step_context(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the sections on the step; lists are empty where nothing was measured."""
    sizes, operations, name = bytes_rows(comparison), operation_rows(comparison), name_heading(comparison)
    return {
        "reasons": _reasons(comparison),
        "part_colours": COLOURS,
        "split_names": list(NAMES.items()),
        "split_table": split_table(comparison, split_rows(comparison)),
        "rank_split_table": split_table(comparison, rank_split_rows(comparison)),
        "includes_warm_up": any(includes_warm_up(entry.run) for entry in comparison.record_set.runs),
        "warm_up_note": WARM_UP_COUNTS,
        "many_ranks": any(len(row.ranks) > MOST_RANKS for row in comparison.rows),
        "bytes_table": PageTable(
            "bytes",
            "Bytes by content",
            name,
            [PageRow(row.candidate) for row in sizes],
            page_columns(BYTES_FIGURES, sizes),
        ),
        "content_sentence": _content_sentence(sizes),
        "shared_memory_sentences": shared_memory_sentences(comparison),
        **payload_context(comparison.payloads, name),
        "operation_table": operation_table(operations, name),
        "has_utilisation": any(row.utilisation is not None for row in operations),
    }


def machine_context(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the section on the machine and the link."""
    return {
        "findings": _findings(comparison),
        "measuring_cost": _measuring_cost(comparison),
        "link_caption": "Bus bandwidth (busbw) of all-reduces, by size. Dashed lines: bandwidth between two ranks.",
    }


def resource_context(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the sections on resource use and operators."""
    return {
        "resources_lede": figure_resources.LEDE,
        "resources_caption": figure_resources.CAPTION,
        "host_table": host_table(comparison),
        "profiles": _profiles(comparison),
    }


def name_heading(comparison: Comparison) -> str:
    """Return the heading of the candidates' names."""
    return "Strategy" if compares_strategies(comparison) else "Setting"


def split_table(comparison: Comparison, rows: Sequence[SplitRow]) -> PageTable:
    """Return the time split of candidates, or of their ranks; the cells of candidates support the reasons."""
    by_rank = any(row.rank is not None for row in rows)
    return PageTable(
        "splits-by-rank" if by_rank else "splits",
        "Time splits by rank" if by_rank else "Table of time splits",
        name_heading(comparison),
        [PageRow(row.candidate, () if row.rank is None else (rank_label(row.rank),)) for row in rows],
        page_columns(SPLIT_FIGURES, rows),
        classes="grouped" if by_rank else "",
        is_tall=by_rank,
        cell_id=None if by_rank else lambda name, key: anchor(comparison, name, key.removesuffix("_s")),
    )


def operation_table(rows: Sequence[OperationRow], name: str) -> PageTable:
    """Return the table of operations, by their kind and content."""
    labels = [
        RowLabel("Operation", "operations", row.traffic.kind, row.traffic.purpose, is_number=False) for row in rows
    ]
    return PageTable(
        "operations",
        "Communication operations",
        name,
        [PageRow(row.candidate, (label,)) for row, label in zip(rows, labels, strict=True)],
        page_columns(OPERATION_FIGURES, rows),
        classes="grouped",
        is_tall=True,
    )


def payload_context(payloads: Mapping[str, Payload], name: str) -> dict[str, Any]:
    """Return the data of the section on bytes between ranks; `name` is the heading of the candidates."""
    rows = rank_bytes_rows(payloads)
    table = PageTable(
        "bytes-by-rank",
        "Bytes by rank",
        name,
        [PageRow(row.candidate, (rank_label(row.counted.rank),)) for row in rows],
        page_columns(RANK_BYTES_FIGURES, rows),
        classes="grouped",
        is_tall=True,
    )
    return {"matrices": matrices(payloads), "rank_bytes_table": table}


def host_table(comparison: Comparison) -> PageTable:
    """Return the resource use of the hosts of every candidate."""
    rows = host_rows(comparison)
    return PageTable(
        "hosts",
        "Table of hosts",
        name_heading(comparison),
        [PageRow(row.candidate, (RowLabel("Host", "host", str(row.usage.host)),)) for row in rows],
        page_columns(HOST_FIGURES, rows),
        classes="grouped",
        is_tall=True,
    )


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
    comparing = comparing_replicas_share(comparison)
    if comparing is not None:
        found.append(
            f"Comparing the replicas took at most {percent(comparing, 2)} of the training time; no step time contains "
            "it."
        )
    return found


def _profiles(comparison: Comparison) -> list[ProfileSection]:
    """Return the operators of the first profiled run of every candidate."""
    return [
        ProfileSection(name, list(profile_sentences(run)), _operator_table(name, rows))
        for name, run in profiled_runs(comparison).items()
        if (rows := profile_rows(run))
    ]


def _operator_table(candidate: str, rows: Sequence[ProfileRow]) -> PageTable:
    return PageTable(
        "",
        f"Operators of {candidate}",
        "Operator",
        [PageRow(row.name) for row in rows],
        page_columns(OPERATOR_FIGURES, rows),
        definition="profile_calls",
        classes="operators",
        is_tall=True,
        is_code=True,
    )

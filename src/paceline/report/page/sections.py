"""What the page says about a step: why it takes its time, its split, its traffic, the machine, its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.timing import includes_warm_up
from paceline.report.explanations import PART, Reason, anchor, explain
from paceline.report.formatting import WARM_UP_COUNTS, listed, percent, seconds
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
    in_memory,
    operation_columns,
    operation_rows,
    rank_split_rows,
    split_columns,
    split_rows,
)
from paceline.report.terminal.doctor import FindingRow, finding_rows

SPLIT_PART = {"descheduled": "compute", "data": "other", "wait_s": "exposed"}
"""Of the parts that have a colour, the one that another belongs to."""


@dataclass(frozen=True)
class ReasonSection:
    """A reason as the page has it: the amount is what leads to the number."""

    amount: str
    rest: str
    remedy: str
    anchor: str
    share: float
    part: str


@dataclass(frozen=True)
class ProfileSection:
    """The operators of a candidate."""

    candidate: str
    sentences: list[str]
    rows: list[ProfileRow]
    columns: list[PageColumn]


def step_context(comparison: Comparison) -> dict[str, Any]:
    """What the template needs for these sections; where nothing was measured, its lists are empty."""
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
        "warm_up_words": WARM_UP_COUNTS,
        "rank_split_rows": ranks,
        "rank_split_columns": split_columns(ranks),
        "many_ranks": any(len(row.ranks) > MOST_RANKS for row in comparison.rows),
        "bytes_rows": sizes,
        "bytes_columns": bytes_columns(sizes),
        "carried": _carried(sizes),
        "in_memory": in_memory(comparison),
        **payload_context(comparison.payloads),
        "operation_rows": operations,
        "operation_columns": operation_columns(operations),
        "has_utilisation": any(row.utilisation is not None for row in operations),
    }


def machine_context(comparison: Comparison) -> dict[str, Any]:
    """The same for the machine, the link, resources and operators."""
    hosts = host_rows(comparison)
    return {
        "findings": _findings(comparison),
        "measuring_cost": _measuring_cost(comparison),
        "link_caption": "busbw of all-reduces over all ranks, by size. Dashed is what one rank gets to another.",
        "resources_lede": figure_resources.LEDE,
        "resources_caption": figure_resources.CAPTION,
        "host_rows": hosts,
        "host_columns": host_columns(hosts),
        "profiles": _profiles(comparison),
    }


def _reasons(comparison: Comparison) -> list[tuple[str, list[ReasonSection]]]:
    """By candidate, in the order of the table."""
    grouped = groupby(explain(comparison), key=lambda reason: reason.candidate)
    return [(candidate, [_words(reason) for reason in own]) for candidate, own in grouped]


def _words(reason: Reason) -> ReasonSection:
    """A sentence begins with its amount, which ends with a bracket; else all of it leads to the number."""
    amount, bracket, rest = reason.text.partition(")")
    part = PART[reason.kind]
    own = (amount + bracket, rest) if bracket else (reason.text, "")
    return ReasonSection(*own, reason.remedy, reason.anchor, reason.share, SPLIT_PART.get(part, part))


def _carried(rows: Sequence[BytesRow]) -> str:
    """What the tensors on the wire are, in a sentence."""
    kinds = {"gradients": "gradients", "buffers": "BatchNorm buffers", "statistics": "BatchNorm statistics"}
    kinds |= {"weights": "weights"}
    found = [words for kind, words in kinds.items() if any(getattr(row, kind) for row in rows)]
    if not found:
        return ""
    sentence = f"{listed(found)}, and nothing else."
    return sentence[0].upper() + sentence[1:]


def _findings(comparison: Comparison) -> list[tuple[bool, list[FindingRow]]]:
    """What there is to mend, then what is fine; each with whether it is."""
    if comparison.examination is None:
        return []
    grouped = groupby(finding_rows(comparison.examination), key=lambda finding: finding.level == "ok")
    return [(fine, list(own)) for fine, own in grouped]


def _measuring_cost(comparison: Comparison) -> list[str]:
    """What it cost to know all this, in sentences."""
    found = []
    cost = comparison.examination.measuring_cost if comparison.examination is not None else None
    if cost is not None:
        interval = f"{percent(cost.low)} to {percent(cost.high)}"
        found.append(
            f"Collecting events costs {percent(cost.share)} of the processor time of a step ({interval}), "
            f"measured on {cost.workload} under {cost.strategy}, {seconds(cost.step_cpu_s)} without them."
        )
    sampling = sampling_share(comparison)
    if sampling is not None:
        found.append(f"Sampling CPU and memory took {percent(sampling, 2)} of a core at most.")
    return found


def _profiles(comparison: Comparison) -> list[ProfileSection]:
    """Of the first run of every candidate that was profiled."""
    found = []
    for row in comparison.rows:
        runs = comparison.record_set.runs_of(row.candidate.name)
        run = next((runs[repeat] for repeat in sorted(runs) if runs[repeat].profiles), None)
        rows = [] if run is None else profile_rows(run)
        if run is not None and rows:
            found.append(ProfileSection(row.candidate.name, list(profile_sentences(run)), rows, profile_columns(rows)))
    return found

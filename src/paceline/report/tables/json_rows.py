"""Tables on the steps and the machine as JSON data: everything that was analysed, and the figures of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from paceline.analysis.checkpoints import checkpoint_cost
from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.curves import validation_curve
from paceline.analysis.resources import host_usage, usage
from paceline.analysis.traffic.payload import Payload
from paceline.records import RunRecord
from paceline.report.figures.candidates import candidate_json
from paceline.report.figures.figure import json_values
from paceline.report.figures.machine import HOST_FIGURES, OPERATOR_FIGURES
from paceline.report.figures.steps import BYTES_FIGURES, OPERATION_FIGURES, RANK_BYTES_FIGURES, SPLIT_FIGURES
from paceline.report.tables.payload import rank_bytes_rows_of
from paceline.report.tables.profile import profile_rows
from paceline.report.tables.resources import HostRow
from paceline.report.tables.steps import bytes_rows, operation_rows, rank_split_rows, split_rows


def rows_json(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the results of every candidate, with its time split."""
    means = {row.candidate: json_values(SPLIT_FIGURES, row) for row in split_rows(comparison)}
    ranks: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in means}
    for row in rank_split_rows(comparison):
        assert row.rank is not None
        ranks[row.candidate][row.rank] = json_values(SPLIT_FIGURES, row)
    return [_row_json(row, means, ranks) for row in comparison.rows]


def _row_json(row: CandidateRow, means: Mapping[str, Any], ranks: Mapping[str, Any]) -> dict[str, Any]:
    found, name = candidate_json(row), row.candidate.name
    if found["split"] is not None:
        found["split"] |= {"mean": means[name], "ranks": ranks[name]}
    return found


def wires_json(comparison: Comparison) -> dict[str, Any]:
    """Return the traffic of every candidate: its operations, and the bytes that its busiest rank sends by content."""
    sizes = {row.candidate: json_values(BYTES_FIGURES, row) for row in bytes_rows(comparison)}
    operations: dict[str, list[dict[str, Any]]] = {name: [] for name in comparison.wires}
    for row in operation_rows(comparison):
        operations[row.candidate].append(asdict(row.traffic) | json_values(OPERATION_FIGURES, row))
    return {
        name: asdict(wire) | {"traffic": operations[name], "bytes": sizes.get(name)}
        for name, wire in comparison.wires.items()
    }


def payloads_json(payloads: Mapping[str, Payload]) -> dict[str, Any]:
    """Return the bytes that the kernel counted, of every candidate."""
    return {name: _payload_json(name, payload) for name, payload in payloads.items()}


def _payload_json(candidate: str, payload: Payload) -> dict[str, Any]:
    rows = rank_bytes_rows_of(candidate, payload)
    ranks = [asdict(row.counted) | json_values(RANK_BYTES_FIGURES, row) for row in rows]
    return payload.to_dict() | {"ranks": ranks}


def operators_json(run: RunRecord) -> list[dict[str, Any]]:
    """Return the operators of the lowest profiled rank; empty without a profile."""
    return [{"name": row.name, **json_values(OPERATOR_FIGURES, row)} for row in profile_rows(run)]


def usage_json(run: RunRecord) -> dict[str, Any]:
    """Return the resource use of the ranks and hosts of a run."""
    hosts = [asdict(own) | json_values(HOST_FIGURES, HostRow("", own)) for own in host_usage(run)]
    return {"ranks": [asdict(own) for own in usage(run)], "hosts": hosts}


def evaluations_json(run: RunRecord) -> list[dict[str, Any]]:
    """Return a run's evaluations, while it trained and at its end."""
    return [asdict(point) for point in validation_curve(run)]


def run_json(run: RunRecord) -> dict[str, Any]:
    """Return JSON data that a run's summary lacks: number format, evaluations, checkpoints, operators, resource use."""
    cost = checkpoint_cost(run)
    return {
        "precision": run.topology.precision,
        "precision_choice": msgspec.to_builtins(run.topology.precision_choice),
        "checkpoints": None if cost is None else asdict(cost) | {"share": cost.share},
        "evaluations": evaluations_json(run),
        "operators": operators_json(run),
        "resources": usage_json(run),
    }

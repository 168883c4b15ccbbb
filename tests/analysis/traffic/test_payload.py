"""Proof of bytes from records: counted bytes compared with the plan or with the recorded operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.timelines import FIRST, operation, timeline
from experiments_on_disk import read_comparison, write_counts, write_experiment
from paceline.analysis.caveats import unplanned_bytes
from paceline.analysis.traffic.payload import PLAN, RECORDED_OPERATIONS, PairBytes, payload_of, recorded_links
from paceline.plans import Plan
from paceline.plans.operations import all_reduce, broadcast
from paceline.records import RunRecord, read_run
from paceline.records.experiment.design import Candidate
from paceline.records.timeline import NO_PEER, Purpose, RowKind

DDP = "repeat-1/4"


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment whose `ddp` all-reduces 4,000 bytes on 3 ranks."""
    return write_experiment(tmp_path / "e", repeats=1, ranks=3, events=True)


def change(path: Path, **values: Any) -> RunRecord:
    """Change the summary of a run and read the run."""
    file = path / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return read_run(path)


def test_counted_bytes_are_compared_with_the_plan(experiment: Path) -> None:
    payload = payload_of(read_run(experiment / DDP))
    assert payload is not None
    assert (payload.expected_from, payload.steps, payload.deviation, payload.holds) == (PLAN, 12, 0.0, True)
    links = Plan((all_reduce(1000, 4, 3, 0.0),)).links()
    assert [(p.source, p.target, p.bytes) for p in payload.pairs] == [
        (link.source, link.target, link.payload_bytes + link.framing_bytes) for link in links
    ]
    first = payload.ranks[0]
    assert first.planned_sent_bytes == sum(link.payload_bytes for link in links if link.source == 0)
    assert first.sent_bytes == first.planned_sent_bytes + (first.framing_bytes or 0)
    assert first.received_bytes == payload.matrix[1][0] + payload.matrix[2][0]
    assert [host.sent_bytes for host in payload.hosts] == [10**6 / 12]


@pytest.mark.parametrize(("off", "holds"), [(0.009, True), (0.011, False), (-0.011, False)])
def test_one_per_cent_is_allowed(experiment: Path, off: float, holds: bool) -> None:
    write_counts(experiment / DDP, Candidate("ddp", "ddp"), 3, 12, off=off)
    run = read_run(experiment / DDP)
    payload = payload_of(run)
    assert payload is not None
    assert payload.deviation == pytest.approx(abs(off), abs=1e-3)
    assert payload.holds is holds
    expected = unplanned_bytes("ddp", run)
    assert (expected is None) == holds
    assert [warning == expected for warning in read_comparison(experiment).warnings].count(True) == (not holds)


def test_unplanned_bytes_have_an_infinite_deviation(experiment: Path) -> None:
    summary = json.loads((experiment / DDP / "summary.json").read_text())
    run = change(experiment / DDP, traffic=summary["traffic"] | {"links": []})
    payload = payload_of(run)
    assert payload is not None
    assert payload.deviation == float("inf")
    assert payload.holds is False
    assert payload.to_dict()["deviation"] is None, "JSON has no infinity"
    assert "but the plan and framing predict 0." in (unplanned_bytes("ddp", run) or "")


def test_bytes_that_were_planned_and_not_sent(experiment: Path) -> None:
    summary = json.loads((experiment / DDP / "summary.json").read_text())
    payload = payload_of(change(experiment / DDP, sockets=summary["sockets"] | {"links": []}))
    assert payload is not None
    assert payload.deviation == 1.0
    assert payload.holds is False


def test_the_proof_holds_if_nothing_was_planned_and_nothing_sent(experiment: Path) -> None:
    payload = payload_of(read_run(experiment / "repeat-1/2"))
    assert payload is not None
    assert (payload.pairs, payload.deviation, payload.holds) == ([], 0.0, True)


def test_without_counts_there_is_no_payload(experiment: Path) -> None:
    assert payload_of(change(experiment / DDP, sockets=None)) is None


def test_records_without_counts_are_read(experiment: Path) -> None:
    file = experiment / DDP / "summary.json"
    summary = json.loads(file.read_text())
    summary["sockets"] = None
    del summary["traffic"]["links"]
    file.write_text(json.dumps(summary))
    assert payload_of(read_run(experiment / DDP)) is None
    assert "ddp" not in read_comparison(experiment).payloads


def test_without_a_plan_the_recorded_operations_replace_it(experiment: Path) -> None:
    payload = payload_of(change(experiment / DDP, traffic=None))
    assert payload is not None
    assert (payload.expected_from, payload.deviation) == (RECORDED_OPERATIONS, 0.0), (
        "the timelines have that all-reduce"
    )


def test_without_plan_and_timelines_there_is_a_matrix_and_no_proof(experiment: Path) -> None:
    for file in (experiment / DDP).glob("timeline-*.bin"):
        file.unlink()
    payload = payload_of(change(experiment / DDP, traffic=None))
    assert payload is not None
    assert (payload.expected_from, payload.deviation, payload.holds, payload.furthest) == (None, None, None, None)
    assert payload.matrix[0][2] > 0
    assert payload.ranks[0].planned_sent_bytes is None


def test_the_run_that_deviates_most_is_shown(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=3, ranks=3, events=True)
    write_counts(path / "repeat-2/4", Candidate("ddp", "ddp"), 3, 12, off=0.5)
    assert read_comparison(path).payloads["ddp"].deviation == pytest.approx(0.5, rel=1e-2)


def recorded(kind: RowKind, size: int, peer: int = NO_PEER, purpose: Purpose = Purpose.GRADIENTS) -> tuple[Any, ...]:
    return operation(kind, 0.1, 0.2, size, peer=peer, purpose=purpose)


def test_links_of_recorded_operations() -> None:
    common = [recorded(RowKind.ALL_REDUCE, 4000), recorded(RowKind.BROADCAST, 100, 0, Purpose.BUFFERS)]
    control = recorded(RowKind.ALL_REDUCE, 8, purpose=Purpose.CONTROL)
    rows = [
        [*common, recorded(RowKind.SEND, 600, 1), control],
        [*common, recorded(RowKind.RECV, 600, 0), control],
    ]
    found = recorded_links({rank: timeline(*own) for rank, own in enumerate(rows)}, [FIRST], 2)
    expected = Plan((all_reduce(1000, 4, 2, 0.0), broadcast(100, 2))).links()
    assert found is not None
    assert [link.payload_bytes for link in found] == [expected[0].payload_bytes + 600, expected[1].payload_bytes]
    assert [link.framing_bytes for link in found] == [expected[0].framing_bytes + 96, expected[1].framing_bytes + 48]


def test_operations_of_only_some_ranks_have_no_links() -> None:
    both, one = [recorded(RowKind.ALL_REDUCE, 4000)] * 2, [recorded(RowKind.ALL_REDUCE, 4000)]
    assert recorded_links({0: timeline(*both), 1: timeline(*one)}, [FIRST], 2) is None
    assert recorded_links({0: timeline(*both)}, [FIRST], 2) is None


def test_a_pair_without_expectation_has_no_deviation() -> None:
    assert PairBytes(0, 1, 100.0, None, None).deviation is None
    assert PairBytes(0, 1, 0.0, 0.0, 0.0).deviation == 0.0

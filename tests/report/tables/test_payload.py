"""Tests of the bytes sent between ranks: sentences, the matrix and the table of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments_on_disk import read_comparison, write_counts, write_experiment
from paceline.analysis.traffic.payload import PairBytes, Payload, RankBytes
from paceline.records.experiment.design import Candidate
from paceline.report.figures.columns import page_columns
from paceline.report.figures.steps import RANK_BYTES_FIGURES
from paceline.report.page.comparison import render
from paceline.report.tables.csv_files import write_tables
from paceline.report.tables.payload import matrices, payload_sentence, rank_bytes_rows
from paceline.report.terminal.comparison import to_json
from paceline.report.verdict.sentences import sentences

AGAINST = "the plan"


def payload(*moved: tuple[float, float], off: float = 0.0, against: str | None = AGAINST) -> Payload:
    """Return the payload of ranks that send and receive the given bytes."""
    ranks = [RankBytes(rank, sent, received, sent, received, 0, 0) for rank, (sent, received) in enumerate(moved)]
    pairs = [PairBytes(0, 1, moved[0][0] * (1 + off), None if against is None else moved[0][0], 0)]
    return Payload(100, against, pairs, ranks, [])


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        ([(9e6, 9e6)] * 3, "every rank sends and receives 9.00 MB per step"),
        ([(9e6, 9.1e6), (9.1e6, 9e6)], "every rank sends 9.00 MB and receives 9.10 MB per step"),
        (
            [(24e6, 24e6)] + [(12e6, 12e6)] * 2,
            "rank 0 sends and receives 24.00 MB per step, each of the others sends an",
        ),
        (
            [(2e6, 5e6), (5e6, 2e6)],
            "rank 0 sends 2.00 MB and receives 5.00 MB per step, rank 1 sends 5.00 MB and",
        ),
        ([(1e6, 1e6), (2e6, 2e6), (3e6, 3e6)], "ranks send from 1.00 MB (rank 0) to 3.00 MB (rank 2) per step"),
        ([(0, 0), (0, 0)], "nothing is sent"),
    ],
)
def test_similar_ranks_share_a_clause(moved: list[tuple[float, float]], said: str) -> None:
    assert payload_sentence(payload(*moved)).startswith(said)


@pytest.mark.parametrize(
    ("off", "against", "said"),
    [
        (0.0, AGAINST, "over 100 steps, exactly the plan plus framing"),
        (1e-7, AGAINST, "over 100 steps, within 0.01% of the plan plus framing"),
        (0.0012, AGAINST, "over 100 steps, 0.12% off the plan plus framing"),
        (0.05, AGAINST, "over 100 steps, 5.00% off the plan plus framing, more than the 1% allowed"),
        (20.0, AGAINST, "far off the plan plus framing, more than the 1% allowed"),
        (0.0, "the recorded operations", "over 100 steps, exactly the recorded operations plus framing"),
        (0.0, None, "measured at the sockets over 100 steps"),
    ],
)
def test_the_deviation_from_the_plan(off: float, against: str | None, said: str) -> None:
    assert payload_sentence(payload((9e6, 9e6), (9e6, 9e6), off=off, against=against)).endswith(said)


def test_the_matrix_has_a_row_per_sender() -> None:
    pairs = [PairBytes(0, 1, 2e6, 2e6, 0), PairBytes(1, 0, 48, 0, 48)]
    ranks = [RankBytes(rank, 2e6, 2e6, 2e6, 2e6, 0, 0) for rank in range(2)]
    (matrix,) = matrices({"a": Payload(10, AGAINST, pairs, ranks, [])})
    texts = [[cell.text for cell in row] for row in matrix.cells]
    assert texts == [["", "2.00"], ["48 B", ""]], "small values are not shown as nothing"
    assert (matrix.unit, matrix.holds) == ("MB", True)
    assert matrix.cells[0][1].share == 1.0


def test_a_matrix_of_many_ranks_is_not_drawn() -> None:
    (matrix,) = matrices({"a": payload(*[(1e6, 1e6)] * 20)})
    assert matrix.cells == []
    assert matrix.sentence.startswith("Every rank")


def test_without_traffic_there_is_no_matrix() -> None:
    assert matrices({"none": payload((0, 0), (0, 0))}) == []


def test_interfaces_are_shown_with_the_first_rank_of_their_host(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", repeats=1, ranks=3, events=True))
    rows = [row for row in rank_bytes_rows(comparison.payloads) if row.candidate == "ddp"]
    assert [row.interface and row.interface.interface for row in rows] == ["lo", None, None]
    assert [row.counted.over_plan for row in rows] == [1.0] * 3
    headings = [column.heading for column in page_columns(RANK_BYTES_FIGURES, rows)]
    assert "Sent ÷ expected" in headings
    assert "Retransmitted" not in headings, "nothing was"


def test_the_page_shows_whether_the_proof_holds(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=1, ranks=3, events=True)
    page = render(read_comparison(path))
    assert "Bytes sent between ranks" in page
    assert page.count('<span class="tag fine">proven</span>') == 2
    write_counts(path / "repeat-1/4", Candidate("ddp", "ddp"), 3, 12, off=0.3)
    page = render(read_comparison(path))
    assert page.count('<span class="tag bad">not as planned</span>') == 1
    assert "The strategy sends other data than expected, or uses another algorithm" in page


def test_without_counts_the_page_has_no_matrix(tmp_path: Path) -> None:
    page = render(read_comparison(write_experiment(tmp_path / "e", repeats=1)))
    assert "Bytes sent between ranks" not in page


def test_names_are_escaped(tmp_path: Path) -> None:
    candidates = (Candidate("<b>mine</b>", "allreduce"),)
    page = render(read_comparison(write_experiment(tmp_path / "e", candidates, repeats=1, events=True)))
    assert "<b>mine" not in page


def test_json_and_csv_have_the_bytes(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", repeats=1, ranks=3, events=True))
    found = json.loads(json.dumps(to_json(comparison), allow_nan=False))["payload"]["ddp"]
    assert (found["holds"], found["deviation"], found["expected_from"]) == (True, 0.0, AGAINST)
    assert len(found["matrix"]) == len(found["ranks"]) == 3
    write_tables(comparison, tmp_path / "csv")
    assert (tmp_path / "csv" / "bytes_by_rank.csv").read_text().startswith("candidate,rank,sent_bytes")
    assert len((tmp_path / "csv" / "payload.csv").read_text().splitlines()) == 1 + 2 * 6


def test_the_verdict_uses_measured_bytes(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=1, ranks=3, events=True)
    file = path / "repeat-1/3/summary.json"
    summary = json.loads(file.read_text())
    for link in summary["sockets"]["links"]:
        link["received_bytes"] = 12 * 500_000 if 0 in (link["source"], link["target"]) else 0
    file.write_text(json.dumps(summary))
    said = sentences(read_comparison(path))
    assert (
        "allreduce: rank 0 sends and receives 2.00× the bytes of any other rank "
        "(2.00 MB per step, measured at its sockets)."
    ) in said

"""Tests of the CSV files: plain numbers, and text that no spreadsheet evaluates as a formula."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from experiments_on_disk import falling, read_comparison, write_experiment
from paceline.records.experiment.design import Candidate
from paceline.report.tables.csv_files import write_tables


def tables(tmp_path: Path, candidates: list[Candidate], **written: object) -> dict[str, list[dict[str, str]]]:
    comparison = read_comparison(write_experiment(tmp_path / "e", candidates, **written))  # type: ignore[arg-type]
    files = write_tables(comparison, tmp_path / "tables")
    return {file.stem: list(csv.DictReader(file.read_text().splitlines())) for file in files}


@pytest.mark.parametrize("name", ['=HYPERLINK("x")', "+1", "-1", "@SUM(A1)", "\tx"])
def test_names_are_not_formulas(tmp_path: Path, name: str) -> None:
    candidates = [Candidate(name, "ddp"), Candidate("p2p", "p2p"), Candidate("ddp", "ddp")]
    found = tables(tmp_path, candidates, failures={"p2p": "=1+1"})
    assert {row["candidate"] for row in found["comparison"]} == {f"'{name}", "p2p", "ddp"}
    assert {row["candidate"] for row in found["losses"]} == {f"'{name}", "ddp"}
    assert {row["failure"] for row in found["comparison"]} == {"", "'=1+1"}
    assert f"'{name}" in {row["candidate"] for row in found["ranks"]}


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    found = tables(tmp_path, [Candidate("a", "ddp"), Candidate("b", "ddp")], losses=lambda *_: -2.5)
    assert {row["loss"] for row in found["losses"]} == {"-2.5"}
    assert float(found["comparison"][0]["train_loss"]) == -2.5


def test_evaluations_and_learning_rates(tmp_path: Path) -> None:
    found = tables(tmp_path, [Candidate("a", "ddp")], repeats=1, evaluations=(4, 12), rate=lambda step: 0.1 * step)
    assert [row["step"] for row in found["evaluations"]] == ["4", "12"]
    assert [float(row["accuracy"]) for row in found["evaluations"]] == [0.5 * 4 / 12, 0.5]
    assert [float(row["lr"]) for row in found["learning_rates"]] == [0.1 * step for step in range(12)]
    assert "learning_rates" not in tables(tmp_path / "without", [Candidate("a", "ddp")])


def test_an_infinite_difference_is_written(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return math.nan if candidate.name == "a" and step else falling(candidate, repeat, step)

    skipped = {"a": range(1, 12)}
    found = tables(tmp_path, [Candidate("a", "ddp"), Candidate("b", "ddp")], losses=losses, skipped=skipped)
    assert found["loss_differences"][0]["last_difference"] == "inf"

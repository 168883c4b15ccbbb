"""The tables as CSV: plain numbers, and text that no spreadsheet takes for a formula."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from experiments_on_disk import falling, read_comparison, write_experiment
from paceline.records.experiment import Contender
from paceline.report.csv_tables import write_tables


def tables(tmp_path: Path, contenders: list[Contender], **written: object) -> dict[str, list[dict[str, str]]]:
    comparison = read_comparison(write_experiment(tmp_path / "e", contenders, **written))  # type: ignore[arg-type]
    files = write_tables(comparison, tmp_path / "tables")
    return {file.stem: list(csv.DictReader(file.read_text().splitlines())) for file in files}


@pytest.mark.parametrize("name", ['=HYPERLINK("x")', "+1", "-1", "@SUM(A1)", "\tx"])
def test_names_are_no_formulas(tmp_path: Path, name: str) -> None:
    contenders = [Contender(name, "ddp"), Contender("p2p", "p2p"), Contender("ddp", "ddp")]
    found = tables(tmp_path, contenders, failures={"p2p": "=1+1"})
    assert {row["contender"] for row in found["comparison"]} == {f"'{name}", "p2p", "ddp"}
    assert {row["contender"] for row in found["losses"]} == {f"'{name}", "ddp"}
    assert {row["failure"] for row in found["comparison"]} == {"", "'=1+1"}
    assert f"'{name}" in {row["contender"] for row in found["ranks"]}


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    found = tables(tmp_path, [Contender("a", "ddp"), Contender("b", "ddp")], losses=lambda *_: -2.5)
    assert {row["loss"] for row in found["losses"]} == {"-2.5"}
    assert float(found["comparison"][0]["train_loss"]) == -2.5


def test_an_infinite_difference_is_written(tmp_path: Path) -> None:
    def losses(contender: Contender, repeat: int, step: int) -> float:
        return math.nan if contender.name == "a" and step else falling(contender, repeat, step)

    found = tables(tmp_path, [Contender("a", "ddp"), Contender("b", "ddp")], losses=losses)
    assert found["partings"][0]["at_end"] == "inf"

"""Test of the benchmark of the step rate on a CPU: it runs, and its figures fit each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.takes(15)


def test_a_round_gives_a_row_per_number_format(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "cpu_step.py"), "--quick", "--model", "cnn", "--batch", "16"]
    subprocess.run([*command, "--json", str(tmp_path / "found.json")], check=True, capture_output=True)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["model"], row["batch"], row["precision"]) for row in rows] == [
        ("cnn", 16, "fp32"),
        ("cnn", 16, "bf16"),
    ]
    flop = [row["gflop_per_s"] * row["step_ms"] for row in rows]
    assert flop[0] == pytest.approx(flop[1])  # Both formats compute the same.
    assert all(row["share"] > 0 for row in rows)

"""Test of benchmarks/measuring_cost.py: it runs, and measures steps with and without events."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run_benchmark

pytestmark = pytest.mark.takes(10)


def test_it_measures_every_side(tmp_path: Path) -> None:
    arguments = ("--model", "cnn", "--quick")
    output, figures = run_benchmark("measuring_cost.py", *arguments, figures=tmp_path / "figures.json")
    assert "Events within 3% of the CPU time of a step" in output
    (model,) = figures["models"]
    assert [row["side"] for row in model["rows"]] == ["with events", "without", "without, again"]
    assert all(row["cpu_ms"] > 0 for row in model["rows"])

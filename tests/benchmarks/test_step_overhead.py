"""Test of benchmarks/step_overhead.py: it runs, and measures every candidate."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run_benchmark

pytestmark = pytest.mark.takes(7)


def test_it_measures_every_candidate(tmp_path: Path) -> None:
    arguments = ("--model", "cnn", "--quick")
    output, figures = run_benchmark("step_overhead.py", *arguments, figures=tmp_path / "figures.json")
    assert "Paceline ddp" in output
    assert figures

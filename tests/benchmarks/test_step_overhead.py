"""The benchmark of a step's overhead runs to its end: it reaches into the loop, so a change there can break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run_benchmark

pytestmark = pytest.mark.takes(7)


def test_it_measures_every_candidate(tmp_path: Path) -> None:
    arguments = ("--model", "cnn", "--quick")
    said, figures = run_benchmark("step_overhead.py", *arguments, figures=tmp_path / "figures.json")
    assert "Paceline ddp" in said
    assert figures

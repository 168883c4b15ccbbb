"""Test of benchmarks/all_reduces.py: it runs, and measures every all-reduce."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run_benchmark

pytestmark = pytest.mark.takes(3)


def test_it_measures_every_all_reduce(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--mb", "1", "--quick")
    output, figures = run_benchmark("all_reduces.py", *arguments, figures=tmp_path / "figures.json")
    assert "ring within 25% of Gloo's" in output
    (size,) = figures["sizes"]
    assert [row["name"] for row in size["rows"]] == ["Gloo's all_reduce", "ring", "halving_doubling"]
    assert all(row["ms"] > 0 for row in size["rows"])

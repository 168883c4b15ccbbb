"""Test of benchmarks/endurance.py, with a few faults: the run survives, and every check at its end holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run_benchmark

pytestmark = pytest.mark.takes(50)


def test_a_run_survives_a_few_faults(tmp_path: Path) -> None:
    arguments = ("--faults", "3", "--seed", "3", "--undisturbed", "0")
    output, figures = run_benchmark("endurance.py", *arguments, figures=tmp_path / "figures.json")
    assert "steps trained again" in output
    assert [one["kind"] for one in figures["survived"]][:2] == ["a rank is killed", "a host is killed"]
    assert all(one["named"] for one in figures["survived"])
    assert figures["figures"]["largest_loss_difference"] < 1e-3

"""Test of benchmarks/endurance.py, with two faults: the run survives, and every check at its end holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import FOLDER
from commands import paceline

pytestmark = pytest.mark.takes(20)

HOSTS = 3


def test_a_run_survives_two_faults(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--faults", "2", "--seed", "3", "--undisturbed", "0", "--hosts", str(HOSTS), "--json", str(file))
    done = paceline(str(FOLDER / "endurance.py"), *arguments, cwd=FOLDER, ranks=HOSTS)
    figures = json.loads(file.read_text())
    assert "steps trained again" in done.stdout
    assert [one["kind"] for one in figures["survived"]] == ["a rank is killed", "a host is killed"]
    assert all(one["named"] for one in figures["survived"])
    assert figures["figures"]["largest_loss_difference"] < 1e-3

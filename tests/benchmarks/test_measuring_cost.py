"""The benchmark runs to its end: it reaches into training, so a change there can break it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_it_measures_every_side(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "measuring_cost.py"), "--model", "cnn", "--quick"]
    done = subprocess.run(
        [*benchmark, "--json", str(figures)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Events within 3% of the CPU time of a step" in done.stdout
    (model,) = json.loads(figures.read_text())["models"]
    assert [row["side"] for row in model["rows"]] == ["with events", "without", "without, again"]
    assert all(row["cpu_ms"] > 0 for row in model["rows"])

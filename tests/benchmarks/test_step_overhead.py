"""The benchmark runs to its end: it reaches into the loop, so a change there can break it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_it_measures_every_candidate(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "step_overhead.py"), "--model", "cnn", "--quick"]
    done = subprocess.run(
        [*benchmark, "--json", str(figures)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paceline ddp" in done.stdout
    assert json.loads(figures.read_text())

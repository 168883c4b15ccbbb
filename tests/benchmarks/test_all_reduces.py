"""The benchmark runs to its end: it reaches into our all-reduces, so a change there can break it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_it_measures_every_all_reduce(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "all_reduces.py"), "--ranks", "2", "--mb", "1", "--quick"]
    done = subprocess.run(
        [*benchmark, "--json", str(figures)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ring within 25% of Gloo's" in done.stdout
    (size,) = json.loads(figures.read_text())["sizes"]
    assert [row["name"] for row in size["rows"]] == ["Gloo's all_reduce", "ring", "halving_doubling"]
    assert all(row["ms"] > 0 for row in size["rows"])

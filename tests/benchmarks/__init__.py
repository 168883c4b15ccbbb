"""Runs benchmarks to their end: they reach into the package, so a change there can break them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"
FORKED = (
    "import torch.multiprocessing as mp; mp.spawn = lambda *a, **k: mp.start_processes(*a, start_method='fork', **k)"
)
"""Forked ranks have torch imported. A process may be forked while torch has no threads, hence `OMP_NUM_THREADS`."""


def run_benchmark(name: str, *arguments: str, figures: Path) -> tuple[str, dict[str, Any]]:
    """Run a benchmark; return what it printed, and its figures."""
    words = [name, *arguments, "--json", str(figures)]
    code = f"{FORKED}; import runpy, sys; sys.argv = {words!r}; sys.path.insert(0, {str(FOLDER)!r}); "
    code += f"runpy.run_path({str(FOLDER / name)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())

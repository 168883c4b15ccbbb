"""Helper that runs a benchmark in a process. Benchmarks use internals of the package, so a change may break them."""

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
"""Code that makes ranks fork, so that they need not import torch. Forking is safe only while torch has no threads,
which `OMP_NUM_THREADS=1` ensures."""


def run_benchmark(name: str, *arguments: str, figures: Path) -> tuple[str, dict[str, Any]]:
    """Run a benchmark; return its output and its figures."""
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

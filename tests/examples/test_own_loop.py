"""Tests of examples/own_loop.py: a user's training loop has the same final loss on one process and on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import paceline, torchrun
from examples import FOLDER, TIMEOUT_S

pytestmark = pytest.mark.takes(20)

OPTIONS = ["--steps", "30", "--batch", "7"]
"""Options with a batch size that divides evenly neither over two ranks nor over the micro-batches of one of them."""


ENVIRONMENT = {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}


def final_loss(output: str) -> float:
    """Return the test loss, which the example must print exactly once."""
    (loss,) = re.findall(r"^test loss (\S+)", output, flags=re.MULTILINE)
    return float(loss)


@pytest.fixture(scope="module")
def alone() -> float:
    """Return the final loss of one process."""
    run, env = [sys.executable, "own_loop.py", *OPTIONS], os.environ | ENVIRONMENT
    done = subprocess.run(run, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return final_loss(done.stdout)


def test_it_runs_without_a_launcher(alone: float) -> None:
    assert alone < 3.5  # The initial loss is about ln 88 = 4.48.


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("gather_scatter", marks=pytest.mark.soak)])
def test_two_ranks_have_the_final_loss_of_one_process(
    alone: float, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    done = torchrun("own_loop.py", strategy, *OPTIONS, cwd=FOLDER)
    assert final_loss(done.stdout) == pytest.approx(alone, abs=1e-4)


def test_compare_runs_it_as_a_script(tmp_path: Path) -> None:
    options = "--script own_loop.py --strategies ddp,single --ranks 2 --steps 8 --repeats 1 --max-repeats 1 --no-proof"
    out = ["--no-doctor", "--json", "--out", str(tmp_path / "out")]
    done = paceline("compare", *options.split(), *out, "--", "--batch", "7", cwd=FOLDER)
    losses = {row["name"]: row["train_loss"]["value"] for row in json.loads(done.stdout)["rows"]}
    assert losses["ddp"] == pytest.approx(losses["single"], rel=1e-5)

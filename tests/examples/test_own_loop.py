"""A loop of the user's own ends in the same model under every lossless strategy and on any number of ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import paceline
from examples import FOLDER, TIMEOUT_S

pytestmark = pytest.mark.takes(12)

OPTIONS = ["--steps", "30", "--batch", "7"]
"""A batch that two ranks, and the micro-batches of one of them, cannot share evenly."""


def final_loss(*command: str) -> float:
    """The test loss that the example prints, once, at its end."""
    run = [sys.executable, *command, *OPTIONS]
    env = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^test loss (\S+)", done.stdout, flags=re.MULTILINE)
    return float(loss)


@pytest.fixture(scope="module")
def alone() -> float:
    """The loss of one process."""
    return final_loss("own_loop.py")


def test_it_learns_as_plain_python(alone: float) -> None:
    assert alone < 3.5  # From ln 88 = 4.48.


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("gather_scatter", marks=pytest.mark.soak)])
def test_two_ranks_end_where_one_process_does(alone: float, strategy: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert final_loss(*torchrun, "own_loop.py", strategy) == pytest.approx(alone, abs=1e-4)


def test_strategies_are_compared_in_it(tmp_path: Path) -> None:
    options = "--script own_loop.py --strategies ddp,single --ranks 2 --steps 8 --repeats 1 --max-repeats 1 --no-proof"
    out = ["--no-doctor", "--json", "--out", str(tmp_path / "out")]
    done = paceline("compare", *options.split(), *out, "--", "--batch", "7", cwd=FOLDER)
    losses = {row["name"]: row["train_loss"]["value"] for row in json.loads(done.stdout)["rows"]}
    assert losses["ddp"] == pytest.approx(losses["single"], rel=1e-5)

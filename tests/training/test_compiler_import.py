"""Tests of what imports torch's compiler, in processes of their own: it can be imported only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.training import compiler_import
from paceline.training.compiler_import import import_compiler_if_used
from paceline.training.optimizers.muon import Muon
from paceline.training.optimizers.of_torch import SGD, AdamW

RUN = """
import sys
from pathlib import Path

from paceline.comm import join_world, leave_world
from paceline.config import RunConfig
from paceline.records import RunFolder
from paceline.training.run import run

config = RunConfig(
    workload="cnn",
    data="synthetic:size=64,test_size=16",
    strategy="single",
    batch=16,
    steps=2,
    optimizer=sys.argv[2],
)
before = []
world = join_world(timeout_s=60)
run(
    config,
    world,
    RunFolder(Path(sys.argv[1])),
    threads=1,
    on_event=lambda event: before.append("torch._dynamo" in sys.modules),
)
leave_world()
print(before[0], before[1], before[-1])
"""
EXCLUDED = """
import sys

import torch

from paceline.training.compiler_import import OPTIMIZER_FUNCTIONS, exclude_from_compiler

exclude_from_compiler(*OPTIMIZER_FUNCTIONS)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
weight.grad = torch.ones(1)
optimizer.zero_grad()
assert weight.grad is None
assert "torch._dynamo" not in sys.modules

import torch._dynamo

weight.grad = torch.ones(1)
optimizer.zero_grad()
assert weight.grad is None
print(type(getattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable")).__name__)
"""


def output_of(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.takes(15)
@pytest.mark.parametrize("optimizer", ["muon", "sgd", "adamw"])
def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path, optimizer: str) -> None:
    assert output_of(RUN, str(tmp_path), optimizer) == "False False False"


@pytest.mark.takes(10)
def test_once_the_compiler_is_imported_torch_excludes_functions_itself() -> None:
    assert output_of(EXCLUDED) == "function"


class OwnMuon(Muon):
    """Optimiser of a user, derived from one that does not import the compiler."""


class OwnSgd(torch.optim.SGD):
    """Optimiser of a user, derived from one that does."""


@pytest.mark.parametrize(
    ("kind", "imports"), [(OwnMuon, False), (OwnSgd, True), (torch.optim.AdamW, True), (SGD, False), (AdamW, False)]
)
def test_steps_of_optimisers_derived_from_torchs_import_it(
    kind: type[torch.optim.Optimizer], imports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(compiler_import, "import_module", imported.append)
    import_compiler_if_used(kind([torch.nn.Parameter(torch.ones(1))]))  # type: ignore[call-arg]
    assert imported == (["torch._dynamo"] if imports else [])

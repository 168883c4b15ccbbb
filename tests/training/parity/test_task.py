"""Tests of the proof before a comparison: a workload that does not repeat is reported, not blamed on the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler

from commands import paceline
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.config.recipe import Precision, Recipe
from paceline.experiments.training_targets import read_parity
from paceline.records import RunFolder
from paceline.records.events import EventT, ParityEvent, UnprovenEvent
from paceline.records.experiment.record import read_experiment
from paceline.training.parity import task
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool

pytestmark = pytest.mark.takes(8)

QUICK = ("--ranks", "2", "--batch", "16", "--steps", "6", "--repeats", "1", "--max-repeats", "1", "--no-doctor")


def events(out: Path, workload: str, strategies: str, kind: type[EventT]) -> list[EventT]:
    paceline("compare", workload, "--strategies", strategies, *QUICK, "--out", str(out))
    return read_experiment(out).events_of(kind)


def test_strategies_are_proven_on_data_and_weights_that_differ_each_time(tmp_path: Path) -> None:
    proofs = events(tmp_path / "out", "proof_cases:workers", "ddp,allreduce", ParityEvent)
    assert [(proof.candidate, proof.relative_error < 1e-6, proof.steps) for proof in proofs] == [
        ("ddp", True, 3),
        ("allreduce", True, 3),
    ]


def test_on_a_workload_that_does_not_repeat_itself_they_are_measured_unproven(tmp_path: Path) -> None:
    (found,) = events(tmp_path / "out", "proof_cases:unseeded", "ddp,allreduce", UnprovenEvent)
    assert found.candidates == ["ddp", "allreduce"]
    unproven = "ddp, allreduce are measured without a parity proof: one process computes different gradients"
    assert found.reason.startswith(unproven)
    assert found.reason.endswith("seed every random number in the model, the loss and the step.")
    assert not read_experiment(tmp_path / "out").events_of(ParityEvent)


def with_precision(precision: Precision) -> Workload:
    """Return a workload that brings its number format in its recipe."""
    torch.manual_seed(0)
    samples = torch.randn(64, 4), torch.randint(0, 3, (64,))
    recipe = Recipe(precision=precision)
    return Workload(model=nn.Linear(4, 3), train=samples, loss=F.cross_entropy, recipe=recipe)


def half() -> Workload:
    return with_precision("fp16")


def double() -> Workload:
    return with_precision("fp64")


def prove_on_rank(comm: Comm, folder: str, workload: str, settings: dict[str, Any]) -> tuple[str, bool]:
    """Prove on all ranks of the pool; return the number format, and whether a scaler was used."""
    world = World(
        comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
        store=dist.HashStore(),
    )  # fmt: skip
    config = RunConfig(workload=f"{__name__}:{workload}", strategy="allreduce", batch=24, **settings)
    with patch.object(task, "prove", wraps=task.prove) as proof:
        task.prove_run(config, world, RunFolder(Path(folder)), threads=1)
    (call,) = proof.call_args_list
    return call.args[3].precision, isinstance(call.args[8], GradScaler)


@pytest.mark.parametrize(
    ("workload", "settings", "precision", "is_scaled"),
    [
        ("half", {}, "fp32", True),
        ("half", {"bn": "sync"}, "fp64", True),
        ("half", {"precision": "bf16"}, "fp32", False),
        ("double", {}, "fp64", False),
    ],
)
def test_the_precision_of_a_workloads_own_recipe_decides_on_the_proof(
    pool: Pool, tmp_path: Path, workload: str, settings: dict[str, Any], precision: str, is_scaled: bool
) -> None:
    folder = RunFolder.create(tmp_path / "proof")
    found = pool.run(prove_on_rank, SIZE, str(folder.path), workload, settings)
    assert found == [(precision, is_scaled)] * SIZE
    parity = read_parity(folder.path)
    assert parity is not None
    assert parity.holds

"""Tests of examples/gpt.py: training on the command line, parity with one process, optimiser and data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpt import GPT, make_optimizer, make_workload

from commands import paceline
from examples import FOLDER
from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.records import read_run
from paceline.records.events import LogEvent
from paceline.records.parity import Parity
from paceline.strategies.registry import create
from paceline.training.parity.proof import prove
from paceline.workloads.batches import Share
from ranks import Pool

pytestmark = pytest.mark.takes(6)


def test_training_on_the_command_line_lowers_the_loss(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = "--strategy ddp --ranks 2 --batch 32 --accumulate 2 --clip-norm 1.0 --steps 60 --json --out"
    summary = json.loads(paceline("train", "gpt:make_workload", *options.split(), str(out), cwd=FOLDER).stdout)
    assert summary["test"]["samples"] == summary["test"]["available"] > 100
    assert summary["weight_divergence"] == 0
    losses = [loss for window in read_run(out).events_of(LogEvent) for loss in window.losses]
    assert len(losses) == 60
    assert losses[0] > 4.3  # About ln 88, the loss of uniform predictions over 88 characters.
    assert sum(losses[-5:]) / 5 < 3.0
    assert summary["test"]["loss"] < 3.0


def proof(comm: Comm, strategy: str, clip_norm: float) -> Parity:
    """Return the parity of clipped and accumulated gradients of uneven shares, in double precision."""
    torch.manual_seed(0)
    workload = make_workload()
    workload.model.double()
    config = RunConfig(batch=11, accumulate=2, clip_norm=clip_norm, precision="fp64")
    share = Share(comm.rank, comm.world_size, config.accumulate, comm.device, torch.float64)
    return prove(create(strategy), workload, share, config, comm)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "gather_scatter"])
def test_gradients_are_those_of_one_process(pool: Pool, strategy: str, ranks: int) -> None:
    verdicts = pool.run(proof, ranks, strategy, 0.1)
    assert verdicts == [verdicts[0]] * ranks
    verdicts[0].check()
    assert verdicts[0].error < 1e-10


def test_replicas_that_exchange_nothing_fail_the_proof(pool: Pool) -> None:
    assert pool.run(proof, 2, "none", 0.1)[0].error > 0.01


def test_only_matrices_have_weight_decay() -> None:
    parameters = list(GPT(vocabulary=10).named_parameters())
    decaying, constant = make_optimizer(parameters).param_groups
    assert decaying["weight_decay"] > 0
    assert constant["weight_decay"] == 0
    assert all(name.endswith(".weight") and "norm" not in name for name in decaying["param_names"])
    assert sorted(decaying["param_names"] + constant["param_names"]) == sorted(name for name, _ in parameters)


def test_targets_are_the_next_characters() -> None:
    for inputs, targets in (make_workload().train, make_workload().test):
        assert torch.equal(inputs[7, 1:], targets[7, :-1])


def test_attention_is_causal() -> None:
    model = GPT(vocabulary=10)
    characters = torch.randint(10, (1, 20))
    changed = characters.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 10
    before, after = model(characters), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12], after[:, 12])

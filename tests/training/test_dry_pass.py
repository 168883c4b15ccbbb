"""The pass before the first step changes nothing, whatever the model does in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.strategies.registry import create
from paceline.training.dry_pass import dry_pass, dry_update
from paceline.training.optimizers.muon import Muon
from paceline.training.precision import storage_dtype
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from ranks import Pool
from registered import LOSSLESS
from training import cases

RANKS = 2


class SeenSamples:
    """Hook that keeps the number of samples of each call of a layer."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.samples.append(len(inputs[0]))


def pass_before_the_first_step(comm: Comm, case: str, strategy: str) -> dict[str, Any]:
    """Run the pass and the update, then train three steps; return what they left, and the weights with and without."""
    found: dict[str, Any] = {}
    for runs_pass in (False, True):
        torch.manual_seed(7)
        workload = cases.make(case)
        config = RunConfig(batch=16, precision="fp64")
        share = Share(comm.rank, comm.world_size, 1, comm.device, storage_dtype("fp64"))
        source = make_source(workload.train, share, batch=16, seed=0)
        model = workload.model
        sync = Sync(model, lambda p: torch.optim.SGD(p, lr=0.1), create(strategy), comm, "broadcast")
        if runs_pass:
            before, state = [value.clone() for value in model.state_dict().values()], torch.get_rng_state()
            seen = SeenSamples()
            layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
            with layer.register_forward_pre_hook(seen):
                found["done"] = dry_pass(config, workload, sync, source)
            dry_update(sync.optimizer, comm.device)
            found["samples"] = seen.samples
            found["same"] = all(map(torch.equal, before, model.state_dict().values()))
            found["same random numbers"] = torch.equal(state, torch.get_rng_state())
            found["gradient"] = max(
                (float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None), default=0.0
            )
        steps = source.epoch(0)
        for _ in range(3):
            (micro_batch,) = next(steps)
            with sync.microbatch(last=True):
                outcome = workload.forward(sync.model, source.fetch(micro_batch))
                (outcome.loss * micro_batch.weight).backward()
            sync.step()
        found["with" if runs_pass else "without"] = [value.clone() for value in model.state_dict().values()]
        sync.detach()  # Closing it would close the groups, which the next call uses.
    return found


@pytest.mark.parametrize("strategy", LOSSLESS)
@pytest.mark.parametrize("case", ["small_bn", "dropout"])
def test_a_dry_pass_changes_nothing(pool: Pool, case: str, strategy: str) -> None:
    for found in pool.run(pass_before_the_first_step, RANKS, case, strategy):
        assert found["done"]
        assert found["samples"] == [8], "a forward pass of a micro-batch"
        assert found["same"]
        assert found["same random numbers"]
        assert found["gradient"] == 0
        assert all(map(torch.equal, found["with"], found["without"]))


def one_shot(comm: Comm) -> bool:
    """Return whether there was a pass on data that reading consumes."""
    workload = cases.make("small_bn")
    share = Share(comm.rank, comm.world_size, 1, comm.device, storage_dtype("fp64"))
    source = make_source(iter([(torch.randn(16, 3), torch.zeros(16).long())]), share, batch=16, seed=0)
    sync = Sync(workload.model, lambda p: torch.optim.SGD(p, lr=0.1), create("allreduce"), comm, "broadcast")
    done = dry_pass(RunConfig(batch=16, precision="fp64"), workload, sync, source)
    sync.detach()
    return done


def test_data_that_reading_consumes_is_left_alone(pool: Pool) -> None:
    assert pool.run(one_shot, RANKS) == [False] * RANKS


class CountsInPython(torch.optim.SGD):
    """Optimiser with a state of its own, which a step changes."""

    steps_made = 0

    def step(self, closure: Any = None) -> Any:
        self.steps_made += 1
        return super().step(closure)


class NeedsLoss(torch.optim.SGD):
    """Optimiser that cannot be stepped without a closure."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: Muon(p, lr=0.1, weight_decay=0.1),
        lambda p: CountsInPython(p, lr=0.1),
        lambda p: NeedsLoss(p, lr=0.1),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_dry_update_changes_nothing(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> None:
    """Before the first step, and in a run that resumes, whose optimiser has a state."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(lambda: 0.0)
        optimizer.zero_grad()
    before, counted = copy.deepcopy((model.state_dict(), optimizer.state_dict())), getattr(optimizer, "steps_made", 0)
    dry_update(optimizer, torch.device("cpu"))
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert getattr(optimizer, "steps_made", 0) == counted


def test_a_dry_update_makes_a_step() -> None:
    calls: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            return super().step(closure)

    dry_update(Counting(nn.Linear(4, 3).parameters(), lr=0.1), torch.device("cpu"))
    assert calls == [1]

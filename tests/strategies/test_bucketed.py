"""`bucketed`: content and order of buckets, gradients as views of buckets, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.errors import UsageError
from paceline.strategies.base.overlapped import Bucket
from paceline.strategies.bucketed import Bucketed, BucketedOptions
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool, RankFailed

SMALL = BucketedOptions(bucket_mb=200 / 2**20, first_mb=100 / 2**20)
"""A first bucket of one matrix (100 bytes), then buckets of two."""


class Recording(Bucketed):
    """Strategy that records which buckets were launched."""

    def __init__(self, options: BucketedOptions = SMALL) -> None:
        super().__init__(options)
        self.launched: list[list[str]] = []

    def launch(self, bucket: Bucket) -> None:
        self.launched.append([slot.name for slot in bucket.slots])
        super().launch(bucket)


class OutOfOrder(nn.Module):
    """Model whose layers are defined in another order than they are used; ranks may swap the two branches."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.second, self.left, self.right, self.first = (nn.Linear(5, 5, bias=False) for _ in range(4))
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        """Apply one layer, two parallel ones, and a last one."""
        x = self.first(x)
        branches = (self.right, self.left) if self.swapped else (self.left, self.right)
        return self.second(branches[0](x) + branches[1](x))


def attach(model: nn.Module, comm: Comm, strategy: Bucketed) -> Sync:
    return Sync(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), strategy, comm, "local")


def launched_buckets(comm: Comm, swap: bool) -> tuple[list[list[str]], list[list[str]], list[int]]:
    """Return the buckets launched in the first and second step, and how many were launched when backward returned."""
    torch.manual_seed(0)
    strategy, in_backward, steps = Recording(), list[int](), list[list[list[str]]]()
    with attach(OutOfOrder(swapped=swap and comm.rank == 1), comm, strategy) as sync:
        for _ in range(3):
            strategy.launched = []
            sync.model(torch.randn(2, 5)).sum().backward()
            in_backward.append(len(strategy.launched))
            sync.step()
            steps.append(strategy.launched)
    assert steps[1] == steps[2]
    return steps[0], steps[1], in_backward


@pytest.mark.parametrize("swap", [False, True])
def test_buckets_are_launched_during_backward_in_the_order_recorded_on_rank_0(pool: Pool, swap: bool) -> None:
    first, second, in_backward = zip(*pool.run(launched_buckets, 3, swap), strict=True)
    of_model = [["first.weight"], ["right.weight", "left.weight"], ["second.weight"]]
    assert first == (of_model,) * 3, "the order of backward is not known yet"
    assert second[0] == second[1] == second[2]
    assert second[0][0] == ["second.weight"], "backward computes it first"
    assert second[0][2] == ["first.weight"]
    assert in_backward == ([3, 3, 3],) * 3, "all were launched before step"


def optimised(comm: Comm) -> bool:
    """Return whether the optimiser reads gradients in the memory of the bucket."""
    strategy = Bucketed()
    with attach(nn.Linear(5, 5), comm, strategy) as sync:
        within: list[bool] = []

        def look(*_: Any) -> None:
            flat = strategy.buckets[0].flat.untyped_storage().data_ptr()
            gradients = [p.grad for p in sync.model.parameters() if p.grad is not None]
            within.append(len(gradients) == 2 and all(g.untyped_storage().data_ptr() == flat for g in gradients))

        sync.optimizer.register_step_pre_hook(look)
        for _ in range(2):
            sync.model(torch.randn(2, 5)).sum().backward()
            sync.step()
    return within == [True, True]


def test_gradients_are_views_into_buckets(pool: Pool) -> None:
    assert pool.run(optimised, 2) == [True, True]


def unused(comm: Comm) -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 5), "spare": nn.Linear(5, 5)})
    sync = attach(model, comm, Bucketed())
    model["used"](torch.randn(2, 5)).sum().backward()
    sync.step()


def test_parameters_without_a_gradient_are_named(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"2 parameters got no gradient on rank 0: spare.weight, spare.bias"):
        pool.run(unused, 2)
    with pytest.raises(RankFailed, match=r"2 parameters got no gradient on rank 0: spare.weight, spare.bias"):
        pool.run(unused, 1)


def kinds(comm: Comm) -> tuple[list[tuple[torch.dtype, int]], Tensor]:
    """Return the buckets of a model with two data types, and its weights after two steps."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 5)])
    strategy = Bucketed()
    with attach(model, comm, strategy) as sync:
        for _ in range(2):
            torch.manual_seed(comm.rank)
            x = torch.randn(2, 5)
            model[2](model[1](model[0](x).double()).float()).sum().backward()
            sync.step()
        found = [(bucket.flat.dtype, len(bucket.slots)) for bucket in strategy.buckets]
    return found, torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def test_a_bucket_has_one_data_type(pool: Pool) -> None:
    (found, weights), (_, others) = pool.run(kinds, 2)
    assert found == [(torch.float32, 4), (torch.float64, 2)]
    assert torch.equal(weights, others)


@pytest.mark.parametrize("option", ["bucket_mb=0", "first_mb=-1", "bucket_mb=nan"])
def test_an_invalid_size_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="bucketed:"):
        create(f"bucketed:{option}")

"""Tests of BatchNorm over ranks: buffers are broadcast or their divergence measured; `sync` equals the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from device_operations import kernels_of
from paceline.comm import Comm
from paceline.errors import WorkloadError
from paceline.strategies.registry import create
from paceline.training.batchnorm import SyncedBatchNorm, UpdatedBuffers, sync_batchnorm
from paceline.training.sync import Sync
from paceline.workloads.sampler import split
from ranks import Pool
from registered import LOSSLESS, one_of_each_family, with_options

BUFFERS = ("running_mean", "running_var")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    model.register_buffer("mask", torch.ones(5))
    return model.double()


def train_three_steps(comm: Comm, bn: Any) -> dict[str, Any]:
    model = make_model()
    sync = Sync(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), create("allreduce"), comm, bn)
    torch.manual_seed(comm.rank)
    for _ in range(3):
        sync.model(torch.randn(4, 3, 8, 8, dtype=torch.float64) + comm.rank).sum().backward()
        sync.step()
    divergence = sync.buffers.divergence()
    own = model[1].running_mean.clone()
    with sync.agreed() as shipped:
        agreed = shipped[1].running_mean.clone()
    after = model[1].running_mean.clone()
    # Before the next forward pass, `broadcast` makes the buffers equal again.
    sync.model(torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    then = model[1].running_mean.clone()
    sync.close()
    return {
        "divergence": divergence,
        "own": own,
        "agreed": agreed,
        "after": after,
        "then": then,
        "kind": type(model[1]),
    }


@pytest.mark.parametrize("bn", ["broadcast", "local", "sync"])
def test_modes(pool: Pool, bn: str) -> None:
    first, second, third = pool.run(train_three_steps, 3, bn)
    for rank in (first, second, third):
        assert torch.equal(rank["agreed"], first["own"])
        assert torch.equal(rank["after"], rank["own"])
        assert rank["kind"] is nn.BatchNorm2d
        assert rank["divergence"] == first["divergence"]
    same_before, same_then = (torch.equal(first[when], third[when]) for when in ("own", "then"))
    assert (same_before, same_then) == {"broadcast": (False, True), "local": (False, False), "sync": (True, True)}[bn]
    assert (first["divergence"] == 0) == (bn == "sync")
    if bn != "sync":
        expected = max(float((r["own"] - first["own"]).norm()) for r in (second, third))
        assert first["divergence"] > 0.1 * expected


def test_broadcast_brings_ranks_closer_than_local(pool: Pool) -> None:
    kept_together, left_alone = (pool.run(train_three_steps, 3, bn)[0]["divergence"] for bn in ("broadcast", "local"))
    assert 0 < kept_together < left_alone


def live_names(comm: Comm) -> list[Any]:
    model = make_model()
    buffers = UpdatedBuffers(model, comm)
    before = len(buffers._updated)
    if comm.rank == 1:  # A change on one rank is enough.
        model.get_buffer("mask").add_(1)
    model(torch.randn(4, 3, 8, 8, dtype=torch.float64))
    buffers.broadcast()
    return [before, buffers._updated, float(model.get_buffer("mask").sum())]


def test_only_buffers_that_change_are_sent(pool: Pool) -> None:
    sent = ["mask", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert pool.run(live_names, 2) == [[0, sent, 5.0]] * 2


class Caching(nn.Module):
    """Model with BatchNorm, a cache that each rank replaces in its own way, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("table", torch.arange(7))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int16))
        self.same = nn.Module()
        self.same.register_buffer("count", self.count)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.count += int(x[0, 0].sign() + 2)
        return self.linear(self.norm(x))


CACHES: dict[str, Any] = {
    "grows alike": lambda step, _: torch.ones(8 * step),
    "appears alike": lambda step, _: torch.ones(2) if step > 2 else None,
    "vanishes alike": lambda step, _: torch.ones(2) if step < 3 else None,
    "changes its type alike": lambda step, _: torch.ones(2, dtype=torch.float64 if step > 2 else torch.float16),
    "grows on rank 0": lambda step, rank: torch.ones(16 if (step, rank) == (3, 0) else 2),
    "grows on rank 1": lambda step, rank: torch.ones(16 if (step, rank) == (3, 1) else 2),
    "differs from the start": lambda _, rank: torch.ones(2 + rank),
    "appears on rank 1": lambda step, rank: torch.ones(2) if step > 2 and rank else None,
    "vanishes on rank 0": lambda step, rank: torch.ones(2) if step < 3 or rank else None,
    "changes its type on rank 1": lambda step, rank: torch.ones(
        2, dtype=torch.float64 if step > 2 and rank else torch.float32
    ),
}
"""Contents of the cache after a step, on a rank."""


Seen = list[list[Tensor]]


def train_with_cache(comm: Comm, case: str, bn: str) -> tuple[str, Seen]:
    """Return the error of this rank, and its statistics and counts after each exchange.

    All ranks stop at the step in which any rank has an error.
    """
    torch.manual_seed(comm.rank)
    model, error, seen = Caching(), "", Seen()
    buffers = UpdatedBuffers(model, comm)
    for step in range(1, 6):
        model(torch.randn(4, 3) * 5 + comm.rank)
        model.cache = CACHES[case](step, comm.rank)
        try:
            if bn == "broadcast":
                buffers.broadcast()
            with buffers.agreed() if bn == "local" else nullcontext():
                seen.append([buffer.clone() for buffer in (*model.norm.buffers(), model.count)])
        except WorkloadError as raised:
            error = raised.message
        if comm.control.largest(float(bool(error))):
            break
        if bn == "local":
            assert buffers.divergence()
    return error, seen


@pytest.mark.parametrize("case", [case for case in CACHES if case.endswith("alike")])
def test_buffers_that_change_their_layout_on_all_ranks_alike_are_followed(pool: Pool, case: str) -> None:
    (error, first), (other_error, second) = pool.run(train_with_cache, 2, case, "broadcast")
    assert error == other_error == ""
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("case", "on", "difference"),
    [
        ("grows on rank 0", {0, 1}, "cache has shape (16,) on rank 0 and (2,) on rank 1"),
        ("grows on rank 1", {1}, "cache has shape (2,) on rank 0 and (16,) on rank 1"),
        ("differs from the start", {0, 1}, "cache has shape (2,) on rank 0 and (3,) on rank 1"),
        ("appears on rank 1", {1}, "cache exists on rank 1, but not on rank 0"),
        ("vanishes on rank 0", {0, 1}, "cache exists on rank 1, but not on rank 0"),
        ("changes its type on rank 1", {1}, "cache is float32 on rank 0 and float64 on rank 1"),
    ],
)
def test_buffers_whose_layouts_differ_are_refused_by_name(pool: Pool, case: str, on: set[int], difference: str) -> None:
    results = pool.run(train_with_cache, 2, case, "broadcast")
    assert {rank for rank, (error, _) in enumerate(results) if difference in error} == on


@pytest.mark.parametrize("case", CACHES)
def test_buffers_that_stay_local_may_differ(pool: Pool, case: str) -> None:
    (error, first), (other_error, second) = pool.run(train_with_cache, 2, case, "local")
    assert error == other_error == ""
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "agreed() yields rank 0's"


def synced_layer(comm: Comm, kind: str, shape: tuple[int, ...], momentum: float | None) -> dict[str, Tensor]:
    """Run one layer under `sync_batchnorm`, on an uneven share of a batch of 7."""
    layer, x, target = layer_and_batch(kind, shape, momentum)
    own = split(len(x), comm.world_size)[comm.rank]
    mine = x[own.start : own.stop].clone().requires_grad_()
    with sync_batchnorm(layer, comm):
        for _ in range(2):
            out = layer(mine)
    (out * target[own.start : own.stop]).sum().backward()
    found = {"out": out.detach(), "x": mine.grad, **{name: getattr(layer, name) for name in BUFFERS}}
    if layer.weight is not None:
        found |= {"weight": comm.control.sum(layer.weight.grad), "bias": comm.control.sum(layer.bias.grad)}
    return found


def layer_and_batch(kind: str, shape: tuple[int, ...], momentum: float | None) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(1)
    layer = getattr(nn, kind)(shape[1], momentum=momentum, affine=momentum is not None).double()
    if layer.weight is not None:
        nn.init.uniform_(layer.weight, 0.5, 2)
        nn.init.normal_(layer.bias)
    return layer, torch.randn(shape, dtype=torch.float64) * 3 + 1, torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("kind", "shape"), [("BatchNorm1d", (7, 5)), ("BatchNorm2d", (7, 3, 4, 4)), ("BatchNorm3d", (7, 2, 2, 3, 2))]
)
def test_sync_is_batchnorm_on_the_whole_batch(
    pool: Pool, kind: str, shape: tuple[int, ...], momentum: float | None, ranks: int
) -> None:
    layer, x, target = layer_and_batch(kind, shape, momentum)
    x.requires_grad_()
    for _ in range(2):
        out = layer(x)
    (out * target).sum().backward()
    found = pool.run(synced_layer, ranks, kind, shape, momentum)
    torch.testing.assert_close(torch.cat([rank["out"] for rank in found]), out.detach())
    torch.testing.assert_close(torch.cat([rank["x"] for rank in found]), x.grad)
    for rank in found:
        for name in BUFFERS:
            torch.testing.assert_close(rank[name], getattr(layer, name))
        if layer.weight is not None:
            torch.testing.assert_close(rank["weight"], layer.weight.grad)
            torch.testing.assert_close(rank["bias"], layer.bias.grad)


def evaluates_like_plain(comm: Comm, track: bool) -> bool:
    layer = nn.BatchNorm2d(3, track_running_stats=track).double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    plain = copy.deepcopy(layer).eval()
    with sync_batchnorm(layer, comm):
        assert type(layer) is SyncedBatchNorm
        if not track and comm.rank == 1:  # In evaluation ranks may have different numbers of batches: none may wait.
            return True
        return torch.equal(layer.eval()(x), plain(x))


@pytest.mark.parametrize("track", [True, False])
def test_sync_evaluates_as_a_plain_layer_does(pool: Pool, track: bool) -> None:
    assert all(pool.run(evaluates_like_plain, 2, track))


def without_bias(comm: Comm) -> tuple[Tensor, None]:
    torch.manual_seed(comm.rank)
    layer = nn.BatchNorm2d(3)
    layer.bias = None
    with sync_batchnorm(layer, comm):
        layer(torch.randn(4, 3, 5, 5)).square().sum().backward()
    return layer.weight.grad, layer.bias


def test_sync_without_a_bias(pool: Pool) -> None:
    for gradient, bias in pool.run(without_bias, 2):
        assert gradient.abs().sum() > 0
        assert bias is None


class Renamed(nn.BatchNorm2d):
    """BatchNorm subclass with the same forward pass."""


class Different(nn.BatchNorm2d):
    """BatchNorm subclass with another forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        """Return twice the usual output."""
        return 2 * super().forward(input)


def kinds_under_sync(comm: Comm) -> tuple[bool, str]:
    renamed = Renamed(3)
    with sync_batchnorm(renamed, comm):
        taken = type(renamed) is SyncedBatchNorm
    assert type(renamed) is Renamed
    try:
        with sync_batchnorm(Different(3), comm):
            return taken, "no error"
    except WorkloadError as error:
        return taken, error.message


def test_sync_takes_subclasses_or_refuses_them_by_name(pool: Pool) -> None:
    for taken, message in pool.run(kinds_under_sync, 2):
        assert taken
        assert "cannot replace Different" in message


def half_precision(comm: Comm) -> tuple[torch.dtype, float]:
    torch.manual_seed(comm.rank)
    layer = nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    with sync_batchnorm(layer, comm), torch.autocast("cpu", torch.bfloat16):
        out = layer(x.bfloat16())
    (out.float() ** 2).sum().backward()
    return out.dtype, float(layer.running_mean.abs().sum())


def test_sync_keeps_precise_statistics_of_bf16(pool: Pool) -> None:
    (kind, first), (_, second) = pool.run(half_precision, 2)
    assert kind == torch.bfloat16
    assert first == second != 0


class Branching(nn.Module):
    """Model with BatchNorm, of which each rank uses another branch."""

    def __init__(self, branch: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.first_norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.second, self.second_norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.branches = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.last = nn.Linear(8, 2)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second_norm(self.second(torch.tanh(self.first_norm(self.first(x)))))
        return self.last(self.branches[self.branch](hidden))


def train_branches(comm: Comm, strategy: str, bn: Any) -> Tensor:
    """Return the weights after four steps in which each rank uses another branch."""
    model = Branching(comm.rank).double()
    torch.manual_seed(comm.rank)
    with Sync(
        model, lambda named: torch.optim.SGD(named, lr=0.1), create(strategy, allow_unused=True), comm, bn
    ) as sync:
        for _ in range(4):
            sync.model(torch.randn(5, 6, dtype=torch.float64)).square().sum().backward()
            sync.step()
        with sync.agreed():
            return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


IN_SMALL_BUCKETS = {
    "ddp": "bucket_mb=0.0001",
    "bucketed": "bucket_mb=0.0001,first_mb=0.0001",
    "shared_memory": "bucket_mb=0.0001,first_mb=0.0001",
    "priority": "slice_mb=0.0001",
}


@pytest.fixture(scope="module")
def weights_after_branches(pool: Pool) -> Callable[[int, str], Tensor]:
    """Return the weights of `train_branches` under `allreduce`, by the number of ranks and the BatchNorm mode."""

    @cache
    def found(ranks: int, bn: str) -> Tensor:
        weights: Tensor = pool.run(train_branches, ranks, "allreduce", bn)[0]
        return weights

    return found


def strategies_modes_and_ranks() -> Iterator[Any]:
    """Yield one strategy of each family in both modes, on 2 or 3 ranks in turn; the soak has the others."""
    strategies = with_options(LOSSLESS, IN_SMALL_BUCKETS)
    for number, strategy in enumerate(strategies):
        for place, bn in enumerate(("sync", "broadcast")):
            for ranks in (2, 3):
                now = strategy in one_of_each_family(strategies, 0) and ranks == 2 + (number + place) % 2
                yield pytest.param(strategy, bn, ranks, marks=() if now else pytest.mark.soak)


@pytest.mark.parametrize(("strategy", "bn", "ranks"), list(strategies_modes_and_ranks()))
def test_ranks_that_use_different_branches(
    pool: Pool, weights_after_branches: Callable[[int, str], Tensor], strategy: str, bn: str, ranks: int
) -> None:
    """Ranks start their buckets at other places in backward than others, between other messages of BatchNorm."""
    for found in pool.run(train_branches, ranks, strategy, bn):
        torch.testing.assert_close(found, weights_after_branches(ranks, bn), rtol=1e-10, atol=1e-10)


class BranchingNorms(Branching):
    """Model whose branches have BatchNorm layers of their own, so that ranks do not run the same ones."""

    def __init__(self, branch: int) -> None:
        super().__init__(branch)
        self.branches = nn.ModuleList([nn.BatchNorm1d(8) for _ in range(3)])


def train_other_layers(comm: Comm) -> str:
    model = BranchingNorms(comm.rank)
    sync = Sync(
        model, lambda named: torch.optim.SGD(named, lr=0.1), create("bucketed", allow_unused=True), comm, "sync"
    )
    try:
        sync.model(torch.randn(5, 6))
    except WorkloadError as error:
        return error.message
    return "no error"


def test_sync_of_different_layers_is_refused(pool: Pool) -> None:
    for rank, message in enumerate(pool.run(train_other_layers, 2)):
        assert f"while rank {rank} is in branches.{rank}, another rank is in another layer" in message


def many_buffers(layers: int) -> tuple[nn.Module, UpdatedBuffers]:
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(layers)])
    none: Any = None  # Copies need no other ranks.
    return model, UpdatedBuffers(model, none)


def test_a_step_copies_all_buffers_into_the_memory_of_the_one_before() -> None:
    counts = []
    for layers in (2, 20):
        _, buffers = many_buffers(layers)
        buffers.keep()
        kept = dict(buffers._kept)
        counts.append(kernels_of(buffers.keep))
        assert all(buffers._kept[name] is copy for name, copy in kept.items())
    assert counts[0] == counts[1], "the kernels of a step depend on the number of buffers"


def test_buffers_that_are_kept_are_those_of_the_last_step() -> None:
    model, buffers = many_buffers(2)
    for step in range(3):
        buffers.keep()
        expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.randn(5, 4) + step)
        buffers.restore()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, expected[name]), name
        model(torch.randn(5, 4))


def test_buffers_that_are_replaced_are_kept_in_their_new_layout() -> None:
    model, buffers = many_buffers(1)
    buffers.keep()
    model[0].running_mean = torch.arange(6.0)
    model[0].running_var = torch.ones(4, dtype=torch.float64)
    buffers.keep()
    with torch.no_grad():
        model[0].running_mean.zero_()
        model[0].running_var.zero_()
    buffers.restore()
    assert model[0].running_mean.tolist() == [0, 1, 2, 3, 4, 5]
    assert model[0].running_var.tolist() == [1, 1, 1, 1]

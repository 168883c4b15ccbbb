"""Tests of the sampler: every sample once per epoch, the same batches on any number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.workloads import sampler as sampler_module
from paceline.workloads.sampler import Sampler, split

SIZES = st.integers(1, 300)
BATCHES = st.integers(1, 80)
SEEDS = st.integers(0, 2**40)
EPOCHS = st.integers(0, 1000)


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_split_tiles_the_range_evenly(total: int, parts: int) -> None:
    pieces = split(total, parts)
    assert len(pieces) == parts
    assert pieces[0].start == 0
    assert pieces[-1].stop == total
    assert all(left.stop == right.start for left, right in itertools.pairwise(pieces))
    sizes = [len(piece) for piece in pieces]
    assert sizes == sorted(sizes, reverse=True), "the larger ones first"
    assert sizes[0] - sizes[-1] <= 1


def test_split_of_a_batch_that_does_not_divide() -> None:
    assert [len(piece) for piece in split(64, 3)] == [22, 21, 21]
    assert split(2, 3) == [range(0, 1), range(1, 2), range(2, 2)]


@given(SIZES, BATCHES, SEEDS, EPOCHS, st.integers(1, 12))
def test_an_epoch_has_every_sample_once(size: int, batch: int, seed: int, epoch: int, smallest: int) -> None:
    batch = max(batch, smallest)
    sampler = Sampler(size, batch, seed, smallest=smallest)
    batches = list(sampler.batches(epoch))
    seen = torch.cat([*batches, torch.empty(0, dtype=torch.int64)]).tolist()
    assert len(set(seen)) == len(seen) == size - sampler.dropped
    assert set(seen) <= set(range(size))
    assert len(batches) == sampler.steps
    assert all(len(indices) == batch for indices in batches[:-1])
    assert all(len(indices) >= smallest for indices in batches)
    assert sampler.dropped < smallest


@given(SIZES, BATCHES, SEEDS, EPOCHS)
def test_nothing_is_dropped_where_one_sample_is_enough(size: int, batch: int, seed: int, epoch: int) -> None:
    sampler = Sampler(size, batch, seed)
    assert sampler.dropped == 0
    assert sum(map(len, sampler.batches(epoch))) == size


def test_dropped_counts_a_last_batch_that_is_too_small() -> None:
    assert Sampler(103, 10, 0, smallest=4).dropped == 3
    assert Sampler(103, 10, 0, smallest=4).steps == 10
    assert Sampler(104, 10, 0, smallest=4).dropped == 0
    assert Sampler(104, 10, 0, smallest=4).steps == 11
    assert Sampler(100, 10, 0, smallest=4).dropped == 0
    assert Sampler(3, 10, 0, smallest=4).steps == 0


@given(SIZES, SEEDS, EPOCHS, BATCHES, st.integers(1, 9))
def test_the_order_depends_on_seed_and_epoch_alone(size: int, seed: int, epoch: int, batch: int, smallest: int) -> None:
    order = Sampler(size, 7, seed).order(epoch)
    torch.manual_seed(batch)
    torch.rand(smallest)
    assert torch.equal(Sampler(size, batch, seed, smallest=smallest).order(epoch), order)


@given(SEEDS, EPOCHS, st.integers(1, 9))
def test_the_order_leaves_the_global_generator_alone(seed: int, epoch: int, state: int) -> None:
    torch.manual_seed(state)
    expected = torch.rand(1)
    torch.manual_seed(state)
    Sampler(50, 7, seed).order(epoch)
    assert torch.equal(torch.rand(1), expected)


@given(SEEDS, SEEDS, EPOCHS, EPOCHS)
def test_the_order_changes_with_seed_and_epoch(seed: int, other_seed: int, epoch: int, other_epoch: int) -> None:
    order = Sampler(100, 7, seed).order(epoch)
    assert not torch.equal(order, torch.arange(100))
    if seed != other_seed:
        assert not torch.equal(Sampler(100, 7, other_seed).order(epoch), order)
    if epoch != other_epoch:
        assert not torch.equal(Sampler(100, 7, seed).order(other_epoch), order)


def test_orders_do_not_repeat_shifted_from_seed_to_seed() -> None:
    """With a key of seed + epoch, epoch 1 of run 0 would equal epoch 0 of run 1."""
    orders = {tuple(Sampler(100, 7, seed).order(epoch).tolist()) for seed in range(12) for epoch in range(12)}
    assert len(orders) == 144


@given(SEEDS, EPOCHS)
def test_without_reshuffling_every_epoch_is_the_first(seed: int, epoch: int) -> None:
    repeating = Sampler(100, 7, seed, reshuffle=False)
    assert torch.equal(repeating.order(epoch), Sampler(100, 7, seed).order(0))


@given(SIZES, BATCHES, EPOCHS)
def test_evaluation_keeps_the_order_of_the_data(size: int, batch: int, epoch: int) -> None:
    sampler = Sampler(size, batch, 5, shuffle=False)
    assert torch.cat(list(sampler.batches(epoch))).tolist() == list(range(size))


@given(SIZES, st.integers(8, 80), SEEDS, EPOCHS)
def test_a_global_batch_is_the_same_on_any_number_of_ranks(size: int, batch: int, seed: int, epoch: int) -> None:
    """The number of ranks changes only the last batch, which may be too small to train on."""
    alone = list(Sampler(size, batch, seed).batches(epoch))
    for ranks in (2, 3, 7):
        shared = list(Sampler(size, batch, seed, smallest=ranks).batches(epoch))
        assert len(alone) - 1 <= len(shared) <= len(alone)
        for whole, indices in zip(alone, shared, strict=False):
            pieces = [indices[part.start : part.stop] for part in split(len(indices), ranks)]
            assert torch.equal(torch.cat(pieces), whole)


def test_the_order_of_an_epoch_goes_to_a_gpu_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from ordinary memory would wait for all earlier steps."""
    copied: list[Tensor] = []

    def copy_to_gpu(tensor: Tensor, device: torch.device) -> Tensor:
        assert device == torch.device("cuda", 0)
        copied.append(tensor)
        return tensor

    monkeypatch.setattr(sampler_module, "copy_to_gpu", copy_to_gpu)
    sampler = Sampler(10, 4, 0)
    on_gpu = list(sampler.batches(2, torch.device("cuda", 0), skip=4))
    assert [one.tolist() for one in on_gpu] == [one.tolist() for one in sampler.batches(2, skip=4)]
    assert [len(one) for one in copied] == [6], "all batches are copied at once"

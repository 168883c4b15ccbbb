"""Tests of tickets: every sample is trained once per epoch, on whichever rank received its ticket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError, WorkloadError
from paceline.workloads.batches import Share, make_source
from paceline.workloads.tickets import Tickets

CPU = torch.device("cpu")
SIZE, BATCH, WORKERS = 47, 12, 3
STEPS = 4
"""Steps per epoch; the last one has 11 samples."""
NUMBERS = torch.arange(SIZE)


def batches() -> list[torch.Tensor]:
    return list(NUMBERS.split(BATCH))


def tickets(data: Any, rank: int = 0, epochs: int | None = None, steps: int | None = None) -> Tickets:
    share = Share(rank, WORKERS, 1, CPU)
    return Tickets(make_source(data, share, batch=BATCH, seed=0), epochs, steps)


def samples(source: Any, pieces: list[Any]) -> list[int]:
    return [int(sample) for piece in pieces for sample in source.fetch(piece)]


@pytest.mark.parametrize("data", [NUMBERS, batches()], ids=["indexed", "stream"])
@given(owners=st.lists(st.integers(0, WORKERS - 1), min_size=2 * STEPS * WORKERS, max_size=2 * STEPS * WORKERS))
def test_every_sample_is_trained_once_an_epoch(data: Any, owners: list[int]) -> None:
    """Tickets are distributed over the ranks at random."""
    by_rank = [tickets(data, rank, epochs=2) for rank in range(WORKERS)]
    source = make_source(data, Share(0, WORKERS, 1, CPU), batch=BATCH, seed=0)
    trained: dict[int, list[int]] = {0: [], 1: []}
    for ticket, rank in enumerate(owners):
        found = by_rank[rank].find(ticket)
        assert found is not None
        assert found.step == ticket // WORKERS
        assert found.epoch == found.step // STEPS
        trained[found.epoch] += samples(source, found.micro_batches)
    assert all(sorted(epoch) == NUMBERS.tolist() for epoch in trained.values())
    assert all(own.find(len(owners)) is None for own in by_rank)
    assert [own.epoch_ends for own in by_rank] == [[STEPS, 2 * STEPS]] * WORKERS


def test_a_ticket_is_the_share_of_a_rank_that_steps_with_all() -> None:
    share = Share(1, WORKERS, 2, CPU)
    source = make_source(NUMBERS, share, batch=BATCH, seed=5)
    whole = Tickets(make_source(NUMBERS, Share(0, WORKERS, 2, CPU), batch=BATCH, seed=5), 1, None)
    for step, pieces in enumerate(source.epoch(0)):
        found = whole.find(step * WORKERS + 1)
        assert found is not None
        assert [(p.samples, p.weight) for p in found.micro_batches] == [(p.samples, p.weight) for p in pieces]
        assert samples(source, found.micro_batches) == samples(source, pieces)


def test_a_run_of_so_many_steps_ends_there() -> None:
    own = tickets(NUMBERS, steps=6)
    assert own.find(6 * WORKERS) is None
    last = own.find(6 * WORKERS - 1)
    assert last is not None
    assert (last.epoch, last.step) == (1, 5)


def test_data_that_runs_once_is_found_out() -> None:
    own = tickets(iter(batches()), steps=100)
    assert own.find(STEPS * WORKERS - 1) is not None
    with pytest.raises(WorkloadError, match="no batch in epoch 2"):
        own.find(STEPS * WORKERS)


def test_a_loader_that_loads_ahead_is_refused() -> None:
    with pytest.raises(UsageError, match="loads ahead"):
        tickets(DataLoader(TensorDataset(NUMBERS), batch_size=4, num_workers=1), epochs=1)

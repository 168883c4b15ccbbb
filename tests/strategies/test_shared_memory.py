"""`shared_memory`: parity over hosts, gradients in memory of their own, optimisers that write into them, overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm.messages.test_payload import counted as count
from comm.messages.test_payload import matrix_of
from paceline.comm import Comm, open_comm
from paceline.errors import UsageError
from paceline.measure.steps import BACKWARD, DATA, FORWARD, OPTIMISER, make_stopwatch
from paceline.plans import Gradient
from paceline.plans.shared_memory import plan
from paceline.records.parity import Parity
from paceline.records.timeline import RowKind
from paceline.strategies.registry import create
from paceline.strategies.shared_memory import SharedMemory
from paceline.training.sync import Sync
from ranks import SIZE, Pool
from training.parity.test_proof import proof

SMALL = "shared_memory:bucket_mb=0.002,first_mb=0.001"
Hosts = tuple[tuple[int, ...], ...]


def proof_on(comm: Comm, hosts: Hosts, strategy: str, case: str, settings: dict[str, Any]) -> Parity:
    return proof(replace(comm, hosts=hosts), strategy, case, settings)


@pytest.mark.parametrize(
    ("hosts", "strategy", "case", "settings"),
    [
        (((0, 1), (2, 3)), SMALL, "cnn", {"batch": 13}),
        (((0, 1, 2), (3,)), "shared_memory", "tied", {"batch": 11, "accumulate": 2, "clip_norm": 0.01}),
        (((0,), (1,), (2,)), SMALL, "small_bn", {"bn": "sync"}),
        (((0, 1, 2, 3),), SMALL + ",thread=true", "frozen", {}),
        (((0, 1),), SMALL, "cnn", {}),
    ],
)
def test_gradients_are_those_of_one_process(
    pool: Pool, hosts: Hosts, strategy: str, case: str, settings: dict[str, Any]
) -> None:
    for verdict in pool.run(proof_on, sum(map(len, hosts)), hosts, strategy, case, settings):
        verdict.check()
        assert verdict.error < 1e-10


def step_bytes(comm: Comm, hosts: Hosts) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the bytes sent between each pair of ranks in a step: counted by the kernel, and planned."""
    ours = replace(comm, hosts=hosts)
    sync, model = attach(ours, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    train(sync, 1)  # After the first step, buckets are rebuilt.
    counted = matrix_of(count(ours, lambda: train(sync, 1)))
    gradients = [Gradient(name, p.numel(), p.element_size()) for name, p in model.named_parameters()]
    links = plan(gradients, comm.world_size, hosts=hosts, **asdict(sync.strategy.options)).links()
    sync.close()
    return counted, [(link.source, link.target, link.payload_bytes + link.framing_bytes) for link in links]


@pytest.mark.parametrize("hosts", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1,), (3,))])
def test_bytes_counted_by_the_kernel_are_those_of_the_plan(pool: Pool, hosts: Hosts) -> None:
    for counted, planned in pool.run(step_bytes, 4, hosts):
        assert counted == planned
        assert bool(planned) == (len(hosts) > 1), "several hosts send messages, one host does not"


def attach(comm: Comm, make: Callable[[Any], torch.optim.Optimizer], text: str = SMALL) -> tuple[Sync, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3).double())
    model[1].register_forward_hook(lambda _, __, output: output.double())
    return Sync(model, make, create(text), comm, "local"), model


def train(sync: Sync, steps: int, max_norm: float | None = None) -> None:
    for step in range(steps):
        torch.manual_seed(100 * sync.rank + step)
        sync.model(torch.randn(4, 20)).square().mean().backward()
        sync.step(max_norm)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_memory(comm: Comm) -> list[bool]:
    """Return, for each gradient that code can see between backward and `step`, whether it is in shared memory."""
    sync, model = attach(comm, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    found = list[bool]()
    for part in (model, model[2], model[0]):  # The whole model, and then one layer after the other.
        part(torch.randn(4, 30).double() if part is model[2] else torch.randn(4, 20)).square().mean().backward()
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:paceline" in line]
        ((start, end),) = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]
        places = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
        found += [start <= place < end for place in places]
        if part is not model[2]:
            sync.step()
    sync.close()
    return found


def test_gradients_are_memory_of_this_rank(pool: Pool) -> None:
    for found in pool.run(in_memory, 2):
        assert len(found) == 4 + 2 + 4
        assert not any(found)


class Writing(torch.optim.SGD):
    """Optimiser that writes into gradients, from its third step on."""

    steps = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.steps >= 2:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
        self.steps += 1
        super().step(closure)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimiser of torch that writes into gradients in this mode."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def trained(comm: Comm, text: str, make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
    sync, model = attach(comm, make, text)
    train(sync, 5)
    sync.close()
    return weights(model)


@pytest.mark.parametrize("make", [Writing, nesterov])
def test_an_optimiser_may_write_into_gradients(pool: Pool, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    expected = pool.run(trained, 3, "ddp", make)[0]
    found = pool.run(trained, 3, SMALL, make)
    for own in found:
        assert all(torch.equal(one, other) for one, other in zip(own, found[0], strict=True))
        for one, other in zip(own, expected, strict=True):
            torch.testing.assert_close(one, other)


def timed_rows(comm: Comm) -> list[tuple[Any, ...]]:
    """Return the timeline rows of some steps."""
    stopwatch = make_stopwatch(comm.device, events=True)
    ours = open_comm(range(SIZE), device=comm.device, backend="gloo", timeout_s=30, stopwatch=stopwatch)
    assert ours is not None
    assert stopwatch.operations is not None
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    sync = Sync(model, lambda p: torch.optim.SGD(p, lr=0.1), create("shared_memory:first_mb=0.3"), ours, "local")
    rows = list[tuple[Any, ...]]()
    for _ in range(6):
        stopwatch.begin()
        stopwatch.lap(DATA)
        loss = sync.model(torch.randn(64, 300)).square().mean()
        stopwatch.lap(FORWARD)
        loss.backward()
        stopwatch.lap(BACKWARD)
        sync.step()
        stopwatch.lap(OPTIMISER)
        rows += [*stopwatch.read(stopwatch.end())[1], *stopwatch.operations.take_rows()]
    sync.close()
    return rows


def of(rows: Sequence[tuple[Any, ...]], step: int, kind: RowKind) -> list[tuple[Any, ...]]:
    return [row for row in rows if row[0] == step and row[1] is kind]


def test_the_timeline_shows_buckets_during_backward(pool: Pool) -> None:
    for rows in pool.run(timed_rows, SIZE):
        for step in range(2, 6):
            (backward,) = of(rows, step, RowKind.BACKWARD)
            operations = of(rows, step, RowKind.SHARED_REDUCE)
            assert len(operations) == 3
            starts, ends = zip(*[(row[5], row[6]) for row in operations], strict=True)
            assert starts[0] < backward[6], "the first bucket starts before backward ends"
            assert list(ends) == sorted(ends)


@pytest.mark.parametrize("option", ["bucket_mb=0", "first_mb=-1"])
def test_invalid_sizes_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="shared_memory:"):
        create(f"shared_memory:{option}")


def alone(comm: Comm) -> bool:
    sync, model = attach(comm, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    before = weights(model)
    train(sync, 2)
    assert isinstance(sync.strategy, SharedMemory)
    sync.close()
    return not torch.equal(before[0], weights(model)[0])


def test_a_single_rank_trains(pool: Pool) -> None:
    assert pool.run(alone, 1) == [True]

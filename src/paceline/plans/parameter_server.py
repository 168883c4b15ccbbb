"""Plan of `parameter_server`: the tensors of each server, and the messages between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.plans.plan import Gradient, Operation, Plan, Transfer, backward_end

REQUEST_BYTES = 32
"""Size of the request that worker 0 sends to a server on a separate rank before each step: four 8-byte numbers."""


def shards(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Return the numbers of the tensors on each server: largest first, each to the server with the least bytes."""
    kept: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        server = loads.index(min(loads))
        kept[server].append(number)
        loads[server] += sizes[number]
    return [sorted(numbers) for numbers in kept]


def plan(gradients: Sequence[Gradient], ranks: int, *, servers: int = 1, extra: bool = False, **_: Any) -> Plan:
    """Return the messages of a step: each worker sends each server its gradients, and receives the weights.

    `ranks` is the number of workers. Servers on separate ranks (`extra`) are numbered after them. Under `asynchronous`,
    workers send the same on average, but not each worker in each step.
    """
    end, operations = backward_end(gradients), list[Operation]()
    for server, numbers in enumerate(shards([g.bytes for g in gradients], servers)):
        size = sum(gradients[number].bytes for number in numbers)
        home = ranks + server if extra else server
        others = [rank for rank in range(ranks) if rank != home]
        if extra:
            operations.append(Operation("send", "direct", REQUEST_BYTES, (Transfer(0, home, REQUEST_BYTES),), end))
        if size and others:
            pushed = tuple(Transfer(rank, home, size) for rank in others)
            pulled = tuple(Transfer(home, rank, size) for rank in others)
            operations.append(Operation("send", "direct", size * len(others), pushed, end))
            operations.append(Operation("send", "direct", size * len(others), pulled, end))
    return Plan(tuple(operations))

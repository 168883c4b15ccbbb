"""The plan of `parameter_server`: who keeps which tensors, and what travels between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.plans.classic import backward_end
from paceline.plans.plan import Gradient, Operation, Plan, Transfer

WORD_BYTES = 32
"""What worker 0 tells a server on a rank of its own before each step: four numbers of eight bytes."""


def shards(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Which tensors each server keeps, by their numbers: the largest first, each to the server with least so far."""
    kept: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        server = loads.index(min(loads))
        kept[server].append(number)
        loads[server] += sizes[number]
    return [sorted(numbers) for numbers in kept]


def plan(gradients: Sequence[Gradient], ranks: int, *, servers: int = 1, extra: bool = False, **_: Any) -> Plan:
    """Each worker sends each server its gradients in one message, and gets the weights in one.

    `ranks` are those that train. Servers of their own are numbered after them. Without waiting for each other
    (`asynchronous`) workers send as much on average, but not each of them in each step.
    """
    end, operations = backward_end(gradients), list[Operation]()
    for server, numbers in enumerate(shards([g.bytes for g in gradients], servers)):
        size = sum(gradients[number].bytes for number in numbers)
        home = ranks + server if extra else server
        others = [rank for rank in range(ranks) if rank != home]
        if extra:
            operations.append(Operation("send", "direct", WORD_BYTES, (Transfer(0, home, WORD_BYTES),), end))
        if size and others:
            pushed = tuple(Transfer(rank, home, size) for rank in others)
            pulled = tuple(Transfer(home, rank, size) for rank in others)
            operations.append(Operation("send", "direct", size * len(others), pushed, end))
            operations.append(Operation("send", "direct", size * len(others), pulled, end))
    return Plan(tuple(operations))

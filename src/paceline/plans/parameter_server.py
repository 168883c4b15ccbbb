"""Plan of `parameter_server`: the tensors of each server, and the messages between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.plans.plan import Gradient, Operation, Plan, Transfer, backward_end

REQUEST_BYTES = 32
"""Size of a request to a server, usually: four 8-byte numbers. Changed settings of the optimiser are sent after it."""
MARK_BYTES = 16
"""Size of the mark at the end of each message of gradients or weights, if synchronous: two 8-byte numbers."""
REPLY_BYTES = 24
"""Size of a server's reply, which it sends with the weights: three 8-byte numbers."""


def shards(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Return the numbers of the tensors on each server: largest first, each to the server with the least bytes."""
    kept: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        server = loads.index(min(loads))
        kept[server].append(number)
        loads[server] += sizes[number]
    return [sorted(numbers) for numbers in kept]


def plan(
    gradients: Sequence[Gradient],
    ranks: int,
    *,
    servers: int = 1,
    extra: bool = False,
    asynchronous: bool = False,
    **_: Any,
) -> Plan:
    """Return the messages of a step: each worker sends each server its gradients, and receives the weights.

    `ranks` is the number of workers. Servers on separate ranks (`extra`) are numbered after them. Worker 0 sends them a
    request before each step and receives a reply; under `asynchronous`, every worker does so with every server. Workers
    then send the same on average, but not each worker in each step.
    """
    operations = list[Operation]()
    for server, numbers in enumerate(shards([g.bytes for g in gradients], servers)):
        size = sum(gradients[number].bytes for number in numbers)
        home = ranks + server if extra else server
        workers = [rank for rank in range(ranks) if rank != home] if size else []
        leads = workers if asynchronous else workers[:1] if extra else []
        message = size if asynchronous else size + MARK_BYTES
        for senders, count in ((leads, REQUEST_BYTES), (workers, message)):
            operations += _send([Transfer(rank, home, count) for rank in senders], backward_end(gradients))
        for receivers, count in ((leads, REPLY_BYTES), (workers, message)):
            operations += _send([Transfer(home, rank, count) for rank in receivers], backward_end(gradients))
    return Plan(tuple(operations))


def _send(transfers: Sequence[Transfer], earliest_s: float) -> list[Operation]:
    """Return the operation of some messages; none if there are no messages."""
    size = sum(transfer.bytes for transfer in transfers)
    return [Operation("send", "direct", size, tuple(transfers), earliest_s)] if transfers else []

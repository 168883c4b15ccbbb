"""The protocol of parameter servers: requests arrive as they were sent, usually in one message."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import Comm
from paceline.plans.parameter_server import REPLY_BYTES, REQUEST_BYTES
from paceline.strategies.parameter_server.protocol import (
    REPLIES,
    RequestKind,
    ServerReply,
    ServerRequest,
    start_receiving,
)
from ranks import Pool

SETTINGS = [0.1, 0.9, 5e-4]
REQUESTS = [
    ServerRequest(RequestKind.PUSH, 17, 0.5, SETTINGS, [True, False]),
    ServerRequest(RequestKind.PUSH, 2**40, None, SETTINGS),
    ServerRequest(RequestKind.PUSH, 3),
    *[ServerRequest(kind) for kind in RequestKind],
]


def as_values(request: ServerRequest) -> tuple[object, ...]:
    return request.kind, request.version, request.max_norm, list(request.settings), list(request.used)


def send_requests(comm: Comm) -> list[int] | list[tuple[object, ...]]:
    """Return the number of messages of each request on rank 0, and the requests that arrive on rank 1."""
    if comm.rank:
        return [as_values(ServerRequest.receive(0, comm.group, len(SETTINGS))) for _ in REQUESTS]
    counts = []
    for request in REQUESTS:
        messages = request.start_sending(1, comm.group)
        counts.append(len(messages))
        for message in messages:
            message.wait()
    return counts


def test_requests_arrive_as_they_were_sent(pool: Pool) -> None:
    counts, received = pool.run(send_requests, 2)
    assert received == [as_values(request) for request in REQUESTS]
    assert counts == [2, 2] + [1] * (len(REQUESTS) - 2), "settings and flags follow in a second message"


def exchange_reply(comm: Comm, reply: ServerReply) -> ServerReply | None:
    if comm.rank == 0:
        reply.start_sending(1, comm.group).wait()
        return None
    received = ServerReply.empty()
    start_receiving(received, 0, comm.group, REPLIES).wait()
    return ServerReply.read(received)


@pytest.mark.parametrize("reply", [ServerReply(2**40, 7), ServerReply(0, -1, failed=True)])
def test_replies_arrive_as_they_were_sent(pool: Pool, reply: ServerReply) -> None:
    assert pool.run(exchange_reply, 2, reply)[1] == reply


def test_sizes_are_those_of_the_plan() -> None:
    assert ServerReply.empty().nbytes == REPLY_BYTES == torch.tensor(ServerReply(1, 2)).nbytes
    assert REQUEST_BYTES == 8 * 4

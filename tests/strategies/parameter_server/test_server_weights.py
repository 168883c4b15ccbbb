"""`ServerWeights`: learning rate per update, and damping and dropping of stale gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.comm.packed_tensors import PackedTensors
from paceline.records.summary import StalenessSummary
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.server_weights import ServerWeights
from paceline.strategies.parameter_server.staleness import StalenessBound


def make_server(bound: StalenessBound, workers: int = 2) -> tuple[ServerWeights, Callable[[float, int], float]]:
    """Return a server with one weight of 0, and a function that pushes a gradient and returns the new weight."""
    parameter = nn.Parameter(torch.zeros(1))
    named = [("w", parameter)]
    optimizer = torch.optim.SGD(named, lr=7.0)
    server = ServerWeights(named, optimizer, workers, bound, first_ticket=workers)
    reply = PackedTensors([parameter.detach()], torch.device("cpu"))
    settings = OptimizerSettings(torch.optim.SGD(named, lr=1.0)).read()

    def push(gradient: float, version: int) -> float:
        server.push([torch.tensor([gradient])], [True], settings, version, reply)
        return float(reply.views[0])

    return server, push


def test_one_update_per_worker_equals_one_step() -> None:
    _, push = make_server(StalenessBound(0, drops=False))
    assert push(1.0, 0) == -0.5
    assert push(1.0, 0) == -1.0


def test_stale_gradients_are_damped_and_counted() -> None:
    server, push = make_server(StalenessBound(2, drops=False), workers=1)
    weights = [push(1.0, 0) for _ in range(5)]
    assert weights == pytest.approx([-1, -2, -3, -3 - 2 / 3, -3 - 2 / 3 - 2 / 4])
    assert server.staleness.summary(2) == StalenessSummary(
        gradients=5,
        mean=2.0,
        median=2,
        max=4,
        max_allowed=2,
        damped=2,
        dropped=0,
        counts=[(staleness, 1) for staleness in range(5)],
    )


def test_stale_gradients_are_dropped_and_counted() -> None:
    server, push = make_server(StalenessBound(1, drops=True), workers=1)
    assert [push(1.0, 0) for _ in range(4)] == [-1, -2, -2, -2]
    assert push(1.0, 2) == -3, "a dropped gradient is not an update"
    assert (server.staleness.dropped, server.staleness.damped) == (2, 0)


def test_without_a_bound_no_gradient_is_dropped() -> None:
    server, push = make_server(StalenessBound(0, drops=True), workers=1)
    assert [push(1.0, 0) for _ in range(3)] == [-1, -2, -3]
    assert server.staleness.dropped == 0

"""`parameter_server`: servers keep the weights and step them, workers send gradients and get weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from paceline.comm.group import Comm
from paceline.comm.parcel import receive_parcel, send_parcel
from paceline.errors import UsageError
from paceline.plans.parameter_server import shards
from paceline.strategies.base import MakeOptimizer, State, Strategy
from paceline.strategies.server_rounds import STATES, WEIGHTS, Link, Shard, clip_factor


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """How many servers, and where."""

    servers: int = 1
    """How many ranks keep weights: each has whole tensors, about as many bytes as the others."""

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UsageError(f"parameter_server:servers is {self.servers}.", hint="it has to be 1 or more")


class ParameterServer(Strategy):
    """Servers keep the weights and step the optimiser; workers send them gradients and get new weights.

    Idea
        The weights live in one place, or in k: each tensor is kept by one server, which alone has its optimiser's
        state. A worker sends every server the gradients of its tensors in one message. When those of all workers are
        there, the server adds them in the order of ranks, steps, and sends everybody the weights. No worker talks to
        another. Servers sit beside the first workers, where a worker reaches its own by a function call.

    Who sends what to whom (k = 2, of M bytes; server A keeps a half of them, server B the other)
        worker 0 ──½g0──▶             ◀──½w── server A
        worker 1 ──½g1──▶ server A    each sums, steps its half of the weights,
        worker 2 ──½g2──▶ server B    and sends it to every worker
        worker 3 ──½g3──▶             ◀──½w── server B

    Cost
        The larger of worker and server traffic over the link: a worker moves M bytes up and M down, a server (p−1)·M/k
        up and as much down, so 2α + max(M, (p−1)·M/k)·β each way; with k = p it is that of an all-reduce.

    When to use it
        With as many servers as ranks, where optimiser state is large: each keeps its part alone.

    When not
        With one server for many workers: all traffic goes through its link, as in `gather_scatter`.

    Source
        Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
    """

    name: ClassVar[str] = "parameter_server"
    travel = "packed"
    Options: ClassVar[type] = ParameterServerOptions

    _shard: Shard | None = None
    """What this rank keeps, where it is a server."""

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Comm) -> nn.Module:
        servers = self.options.servers
        if servers > comm.world_size:
            raise UsageError(
                f"parameter_server:servers={servers} is more than the {comm.world_size} ranks that there are.",
                hint="servers sit beside workers, one on each of the first ranks",
            )
        module = super().attach(model, make_optimizer, comm)
        kept = shards([parameter.nbytes for _, parameter in self.parameters], servers)
        links = [
            Link(server, [self.parameters[number] for number in numbers], comm.device)
            for server, numbers in enumerate(kept)
        ]
        self._remote = [link for link in links if link.home != comm.rank and link.gradients.bytes]
        own = links[comm.rank] if comm.rank < servers else None
        self._shard = None if own is None else Shard(own, comm.world_size, comm.group, comm.device)
        self._links = links
        return module

    def step(self, max_norm: float | None = None) -> None:
        self.gradients()  # All are there, or filled up, or an error names them.
        used = {id(parameter): parameter.grad is not None for _, parameter in self.parameters}
        group = self.comm.group
        arriving = [link.weights.receive(link.home, group, WEIGHTS) for link in self._remote]
        if self._shard is not None:
            self._shard.expect()
        leaving = [link.push(group) for link in self._remote]
        for link in self._remote:
            for parameter in link.parameters:  # Not this rank's to step.
                parameter.grad = None
        if self._shard is not None:
            self._shard.add_up([used[id(parameter)] for parameter in self._shard.link.parameters])
        if max_norm is not None:
            self._clip(max_norm)
        self.update(None)
        if self._shard is not None:
            leaving += self._shard.reply()
        for link, weights in zip(self._remote, arriving, strict=True):
            weights.wait()
            link.take()
        for message in leaving:
            message.wait()

    def state(self) -> State:
        state = super().state()
        for link in self._links:
            kept = {name: state.optimizer[name] for name in link.names if name in state.optimizer}
            others = [rank for rank in range(self.comm.world_size) if rank != link.home]
            if link.home == self.comm.rank:
                for rank in others:
                    send_parcel(kept, rank, self.comm.group, STATES)
            else:
                received = receive_parcel(link.home, self.comm.group, STATES)
                state.optimizer |= received
        return state

    def close(self) -> None:
        self._shard, self._links, self._remote = None, [], []
        super().close()

    def _clip(self, max_norm: float) -> None:
        """Clips by the norm over all servers, which each knows a part of."""
        own = torch.zeros(1, dtype=torch.float64) if self._shard is None else self._shard.squared_norm()
        whole = own if len(self._links) == 1 else self.comm.sum(own)
        if self._shard is not None:
            self._shard.scale(clip_factor(max_norm, whole))

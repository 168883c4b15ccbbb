"""Servers that go by rounds: each step waits for the gradients of all workers, and everybody gets the new weights.

A server beside a worker steps the worker's own parameters, by the worker's own optimiser. One on a rank of its own
steps those of its own model, and does what worker 0 says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.comm.packed_tensors import PackedTensors, PackedTransfer, naming_peer, receive_without_timeout
from paceline.errors import RankError
from paceline.plans.parameter_server import REQUEST_BYTES
from paceline.records.timeline import Purpose
from paceline.strategies.base.strategy import copies
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings

GRADIENTS, WEIGHTS, STATES, NORMS, WORDS = range(5)
"""Tags: two ranks that are both worker and server send each other gradients and weights."""
STEP, SETTINGS, STATE, LOAD, LEAVE = range(5)
"""What worker 0 may say to a server on a rank of its own."""
REQUEST_NUMBERS = REQUEST_BYTES // 8
EPSILON = 1e-6
"""As in torch's clip_grad_norm_."""


class ServerShard:
    """A worker's way to one server: what it keeps, and the messages there and back."""

    def __init__(self, home: int, parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.home = home
        """The server's rank."""
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        weights = [parameter.detach() for parameter in self.parameters]
        self.gradients = PackedTensors(weights, device)
        self.weights = PackedTensors(weights, device)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send: there may be more servers than tensors."""
        return not self.weights.bytes

    @property
    def used(self) -> list[bool]:
        """Which parameters have a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    def push(self, group: dist.ProcessGroup) -> PackedTransfer:
        """Sends the gradients that backward has left."""
        self.gradients.pack([parameter.grad for parameter in self.parameters])
        (message,) = self.gradients.send([self.home], group, GRADIENTS)
        return message

    def take(self) -> None:
        """Puts the weights that have come into the model."""
        self.weights.unpack([parameter.detach() for parameter in self.parameters])

    def give(self, rank: int, group: dist.ProcessGroup) -> None:
        """Sends the weights of the model to a rank that `fetch`es them."""
        if self.is_empty:
            return
        self.weights.pack([parameter.detach() for parameter in self.parameters])
        for message in self.weights.send([rank], group, WEIGHTS):
            message.wait()

    def fetch(self, rank: int, group: dist.ProcessGroup) -> None:
        """Gets them from there into the model."""
        if self.is_empty:
            return
        self.weights.receive(rank, group, WEIGHTS).wait()
        self.take()


class ShardReducer:
    """A server's side: it adds up the gradients of all workers, has the optimiser step, and sends the weights."""

    def __init__(self, link: ServerShard, workers: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.link = link
        self._group = group
        self._workers = workers
        weights = [parameter.detach() for parameter in link.parameters]
        self._others = [rank for rank in range(workers) if rank != link.home]
        self._incoming = {rank: PackedTensors(weights, device) for rank in self._others}
        self._arriving: dict[int, PackedTransfer] = {}

    def expect(self) -> None:
        """Starts receiving what all workers but its own send."""
        self._arriving = {
            rank: self._incoming[rank].receive(rank, self._group, GRADIENTS)
            for rank in self._others
            if not self.link.is_empty
        }

    def add_up(self, used: Sequence[bool]) -> None:
        """Waits for all, and leaves the mean where the optimiser looks for it; nothing for what nobody has used."""
        packets = {self.link.home: self.link.gradients} | self._incoming
        if self.link.home < self._workers:
            self.link.gradients.pack([parameter.grad for parameter in self.link.parameters])
        total, *rest = [packets[rank] for rank in range(self._workers)]
        for message in self._arriving.values():
            message.wait()
        for packet in rest:  # In the order of ranks: the same sum to the last bit, whoever comes first.
            total.add(packet)
        if total.flats:
            torch._foreach_div_(total.flats, self._workers)
        for parameter, mean, anywhere in zip(self.link.parameters, total.views, used, strict=True):
            parameter.grad = mean if anywhere else None

    def squared_norm(self) -> Tensor:
        """Of the mean gradients that it keeps."""
        gradients = [p.grad for p in self.link.parameters if p.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        return torch.stack(squares).sum().cpu().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)

    def scale(self, factor: float) -> None:
        """Multiplies the gradients; there may be none, in this step or at all."""
        gradients = [p.grad for p in self.link.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def reply(self) -> list[PackedTransfer]:
        """Starts sending the weights to all workers but its own."""
        if self.link.is_empty:
            return []
        self.link.weights.pack([parameter.detach() for parameter in self.link.parameters])
        return self.link.weights.send(self._others, self._group, WEIGHTS)


def clip_factor(max_norm: float, squared_norm: Tensor) -> float:
    """What gradients are multiplied by, as torch's clip_grad_norm_ does."""
    return min(1.0, max_norm / (math.sqrt(float(squared_norm)) + EPSILON))


class SyncWorker:
    """A worker under servers that wait for all workers, and the server on its rank if there is one."""

    def __init__(
        self,
        links: Sequence[ServerShard],
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        group: dist.ProcessGroup,
        update: Callable[[], None],
    ) -> None:
        self._links = links
        self._optimizer = optimizer
        self._comm = comm
        self._group = group
        self._update = update
        self._remote = [link for link in links if link.home != comm.rank and not link.is_empty]
        own = [link for link in links if link.home == comm.rank]
        self._shard = ShardReducer(own[0], comm.world_size, group, comm.device) if own else None
        self._told = links if comm.servers and comm.rank == 0 else []
        """Whom this worker tells what comes next."""
        self._settings = OptimizerSettings(optimizer)
        self._told_settings: list[float] = []
        for link in self._told:
            link.give(link.home, group)

    def step(self, max_norm: float | None) -> None:
        """Sends gradients, steps what this rank keeps, and gets the weights of the rest."""
        group, own = self._group, self._shard
        self._announce(max_norm)
        with self._comm.carrying(Purpose.WEIGHTS):
            arriving = [link.weights.receive(link.home, group, WEIGHTS) for link in self._remote]
        if own is not None:
            own.expect()
        leaving = [link.push(group) for link in self._remote]
        for link in self._remote:
            for parameter in link.parameters:  # Not this rank's to step.
                parameter.grad = None
        if own is not None:
            own.add_up(own.link.used)
        if max_norm is not None and not self._comm.servers:
            self._clip(max_norm)
        self._update()
        if own is not None:
            with self._comm.carrying(Purpose.WEIGHTS):
                leaving += own.reply()
        for link, weights in zip(self._remote, arriving, strict=True):
            weights.wait()
            link.take()
        for message in leaving:
            message.wait()

    def _announce(self, max_norm: float | None) -> None:
        """Tells servers on ranks of their own that a step comes, how it is clipped, and how optimisers are set."""
        if not self._comm.servers:
            return
        settings = self._settings.read()  # On all ranks: one that cannot be told is an error on each.
        if settings != self._told_settings:  # At first, and when a scheduler has changed them.
            self._told_settings = settings
            self._tell(SETTINGS, len(settings), then=lambda _: torch.tensor(settings, dtype=torch.float64))
        if all(all(link.used) for link in self._told):
            self._tell(STEP, math.nan if max_norm is None else max_norm)
        else:
            flags = {link.home: torch.tensor(link.used, dtype=torch.uint8) for link in self._told}
            self._tell(STEP, math.nan if max_norm is None else max_norm, 1, then=lambda link: flags[link.home])

    def _tell(self, *word: float, then: Callable[[ServerShard], Tensor] | None = None) -> None:
        for link in self._told:
            said = torch.zeros(REQUEST_NUMBERS, dtype=torch.float64)
            said[: len(word)] = torch.tensor(word, dtype=torch.float64)
            for tensor in [said] if then is None else [said, then(link)]:
                if tensor.numel():
                    with naming_peer(link.home):
                        dist.send(tensor, group_dst=link.home, group=self._group, tag=WORDS)

    def finish(self) -> None:
        """A step leaves nothing in flight."""

    def state(self) -> dict[str, dict[str, Any]]:
        """What all servers' optimisers keep, on every rank."""
        self._tell(STATE)
        found: dict[str, dict[str, Any]] = {}
        for link in self._links:
            if link.home == self._comm.rank:
                found |= distribute_state(link, self._optimizer, self._comm, self._group)
            else:
                found |= to_device(receive_json_message(link.home, self._group, STATES), self._comm.device)
        return found

    def load(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Gives it to those who step; forgets what this rank's optimiser was given for parameters of others."""
        self._tell(LOAD)
        for link in self._told:
            link.give(link.home, self._group)
            send_json_message({name: kept.get(name, {}) for name in link.names}, link.home, self._group, STATES)
        for link in self._remote:
            for parameter in link.parameters:
                self._optimizer.state.pop(parameter, None)

    def figures(self) -> dict[str, Any]:
        """In step, no gradient is late."""
        return {}

    def abandon(self) -> None:
        """Servers notice by themselves when workers are gone."""

    def close(self) -> None:
        """Nothing goes on between steps; servers on ranks of their own may go."""
        with suppress(RankError):  # One that is gone needs no farewell.
            self._tell(LEAVE)

    def _clip(self, max_norm: float) -> None:
        """Clips by the norm over all servers, of which each knows a part."""
        own = torch.zeros(1, dtype=torch.float64) if self._shard is None else self._shard.squared_norm()
        whole = own if len(self._links) == 1 else self._comm.sum(own)
        if self._shard is not None:
            self._shard.scale(clip_factor(max_norm, whole))


class SyncServer:
    """A server on a rank of its own, for workers that step together."""

    def __init__(
        self, link: ServerShard, optimizer: torch.optim.Optimizer, comm: Comm, update: Callable[[], None]
    ) -> None:
        self._link = link
        self._optimizer = optimizer
        self._comm = comm
        self._group = comm.full_group
        self._update = update
        self._settings = OptimizerSettings(optimizer)
        self._shard = ShardReducer(link, comm.world_size, self._group, comm.device)
        link.fetch(0, self._group)

    def serve(self) -> None:
        """Does what worker 0 says, until that is to leave."""
        while True:
            what, number, flag, _ = self._hear(torch.zeros(REQUEST_NUMBERS, dtype=torch.float64)).tolist()
            if what == LEAVE:
                return
            if what == STEP:
                self._step(None if math.isnan(number) else number, has_unused=flag > 0)
            elif what == SETTINGS:
                self._settings.write(self._hear(torch.zeros(int(number), dtype=torch.float64)).tolist())
            elif what == STATE:
                distribute_state(self._link, self._optimizer, self._comm, self._group)
            else:
                self._load()

    def _step(self, max_norm: float | None, *, has_unused: bool) -> None:
        self._shard.expect()
        used = [True] * len(self._link.names)
        if has_unused and used:
            used = self._hear(torch.zeros(len(used), dtype=torch.uint8)).bool().tolist()
        self._shard.add_up(used)
        if max_norm is not None:
            self._shard.scale(clip_factor(max_norm, self._norm_of_all()))
        self._update()
        for message in self._shard.reply():
            message.wait()

    def _norm_of_all(self) -> Tensor:
        """The squared norm over all servers, which tell each other theirs."""
        own = self._shard.squared_norm()
        first = self._comm.world_size
        others = [rank for rank in range(first, first + self._comm.servers) if rank != self._comm.rank]
        leaving = [dist.isend(own, group_dst=rank, group=self._group, tag=NORMS) for rank in others]
        theirs = {rank: torch.zeros_like(own) for rank in others}
        for rank in others:
            dist.recv(theirs[rank], group_src=rank, group=self._group, tag=NORMS)
        for message in leaving:
            assert message is not None
            message.wait()
        norms = theirs | {self._comm.rank: own}
        return torch.stack([norms[rank] for rank in sorted(norms)]).sum()

    def _load(self) -> None:
        self._link.fetch(0, self._group)
        kept = to_device(receive_json_message(0, self._group, STATES), self._comm.device)
        for name, parameter in zip(self._link.names, self._link.parameters, strict=True):
            self._optimizer.state[parameter] = kept[name]

    def _hear(self, tensor: Tensor) -> Tensor:
        return receive_without_timeout(tensor, 0, self._group, WORDS)


def distribute_state(
    link: ServerShard, optimizer: torch.optim.Optimizer, comm: Comm, group: dist.ProcessGroup
) -> dict[str, dict[str, Any]]:
    """Gives every other worker what the optimiser keeps for a server's parameters, and returns it."""
    kept = kept_for(link.names, link.parameters, optimizer)
    for rank in range(comm.world_size):
        if rank != link.home:
            send_json_message(kept, rank, group, STATES)
    return kept


def kept_for(
    names: Sequence[str], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """What an optimiser keeps for some parameters, by their names."""
    named = zip(names, parameters, strict=True)
    return {name: copies(optimizer.state[parameter]) for name, parameter in named if parameter in optimizer.state}


def to_device(kept: Mapping[str, Mapping[str, Any]], device: torch.device) -> dict[str, dict[str, Any]]:
    """What an optimiser keeps, where it is used; counts of steps stay in main memory, as optimisers have them."""
    return {name: {key: _moved(key, value, device) for key, value in values.items()} for name, values in kept.items()}


def _moved(key: str, value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and key != "step" else value

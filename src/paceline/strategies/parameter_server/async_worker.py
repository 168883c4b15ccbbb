"""A worker under servers that answer each by itself: it asks them all at once, and waits for no other worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.comm.packed_tensors import PackedTransfer, naming_peer
from paceline.errors import RankError, UsageError
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters
from paceline.strategies.parameter_server.async_server import (
    ANSWERS,
    AsyncServer,
    ServerRequest,
    colocated_server,
    untimed,
)
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.server_weights import ServerReply
from paceline.strategies.parameter_server.staleness import Staleness, StalenessBound
from paceline.strategies.parameter_server.synchronous import STATES, WEIGHTS, WORDS, ServerShard, to_device


class ServerClient:
    """What a worker has under way with one server."""

    def __init__(self, link: ServerShard, group: dist.ProcessGroup, settings: int) -> None:
        self.link = link
        self.version = 0
        """Of the weights that the worker has from it."""
        self._group = group
        self._answer = torch.zeros(len(ServerReply._fields), dtype=torch.int64)
        self._word = torch.zeros(2 + settings + len(link.names), dtype=torch.float64)
        self._arriving: list[PackedTransfer] = []
        self._leaving: list[PackedTransfer] = []

    def push(self, settings: Sequence[float], used: Sequence[bool]) -> None:
        """Starts sending gradients, and receiving weights for them."""
        self._expect()
        self.say(ServerRequest.PUSH, settings, used)
        self._leaving.append(self.link.push(self._group))

    def pull(self) -> None:
        """Starts receiving weights."""
        self._expect()
        self.say(ServerRequest.PULL)

    def take(self) -> ServerReply:
        """Waits for the weights, and puts them into the model."""
        for message in self._arriving:
            message.wait()
        self.link.take()
        for message in self._leaving:
            message.wait()
        version, ticket, failed = self._answer.tolist()
        self.version = version
        return ServerReply(version, ticket, bool(failed))

    def say(self, what: ServerRequest, settings: Sequence[float] = (), used: Sequence[bool] = ()) -> None:
        """Tells the server what comes."""
        word = [float(what), float(self.version), *settings, *map(float, used)]
        self._word[: len(word)] = torch.tensor(word, dtype=torch.float64)
        with naming_peer(self.link.home):
            dist.send(self._word, group_dst=self.link.home, group=self._group, tag=WORDS)

    def hear(self) -> dict[str, dict[str, Any]]:
        """What the server sends by name."""
        with naming_peer(self.link.home):
            return receive_json_message(self.link.home, untimed(self._group), STATES)

    def _expect(self) -> None:
        home, group = self.link.home, self._group
        with naming_peer(home):
            answer = PackedTransfer(dist.irecv(self._answer, group_src=home, group=group, tag=ANSWERS), home)
        self._arriving, self._leaving = [answer, self.link.weights.receive(home, group, WEIGHTS)], []


class AsyncWorker:
    """A worker under servers that answer each by itself, and the server on its rank if there is one."""

    def __init__(
        self,
        links: Sequence[ServerShard],
        parameters: NamedParameters,
        optimizer: torch.optim.Optimizer,
        make_optimizer: MakeOptimizer,
        comm: Comm,
        group: dist.ProcessGroup,
        bound: StalenessBound,
    ) -> None:
        self._bound = bound
        self.ticket = comm.rank
        """The share that this worker trains next: at first the one that is its own anyway."""
        self._comm = comm
        self._links = links
        self._parameters = parameters
        self._optimizer = optimizer
        here = [link for link in links if link.home == comm.rank and not link.is_empty]
        for link in links if comm.servers and comm.rank == 0 else []:
            link.give(link.home, group)
        desks = [colocated_server(link, parameters, make_optimizer, comm, group, bound) for link in here]
        self._local = [LocalServerClient(link, desk, comm) for link, desk in zip(here, desks, strict=True)]
        self._settings = OptimizerSettings(optimizer)
        away = [ServerClient(link, group, self._settings.count) for link in links if link.home != comm.rank]
        self._errands = [errand for errand in away if not errand.link.is_empty]
        self._idle = [errand for errand in away if errand.link.is_empty and comm.servers]
        """With servers on ranks of their own that keep nothing: they stay until all have left."""
        self._quiet = untimed(group)

    def step(self, max_norm: float | None) -> None:
        """Sends gradients to all servers, and goes on with the weights that they have then."""
        if max_norm is not None:
            raise UsageError(
                "asynchronous servers do not clip: no rank ever has the gradient of a whole batch.",
                hint="step() without max_norm, or clip what this rank has yourself, before step()",
            )
        settings = self._settings.read()
        for errand in self._errands:
            errand.push(settings, errand.link.used)
        for local in self._local:
            local.push(settings)
        answers = self._take()
        self.ticket = next(answer.ticket for home, answer in answers if home == self._links[0].home)
        self._comm.mark_agreed()
        for _, parameter in self._parameters:
            parameter.grad = None
        self._optimizer.step()  # It has nothing to step; but schedulers want to see it called.

    def finish(self) -> None:
        """Gives every worker the same weights: those that come of all that any of them has sent."""
        self._comm.smallest(0)
        for errand in self._errands:
            errand.pull()
        for local in self._local:
            local.pull()
        self._take()
        self._comm.smallest(0)  # Nobody goes on before all have them.

    def _take(self) -> list[tuple[int, ServerReply]]:
        answers = [(errand.link.home, errand.take()) for errand in self._errands]
        answers += [(local.link.home, local.take()) for local in self._local]
        for local in self._local:
            if local.desk.master.failure is not None:
                raise local.desk.master.failure
        for errand, (_, answer) in zip(self._errands, answers, strict=False):
            if answer.failed:
                raise self._failure_of(errand)
        return answers

    def _failure_of(self, errand: ServerClient) -> RankError:
        errand.say(ServerRequest.WHY)
        why = errand.hear()["why"]
        message = f"the server on rank {errand.link.home} has failed: {why['reason']}"
        return RankError(message, detail=why["detail"], peer_lost=why["peer_lost"])

    def state(self) -> dict[str, dict[str, Any]]:
        """What all servers' optimisers keep."""
        found: dict[str, dict[str, Any]] = {}
        for errand in self._errands:
            errand.say(ServerRequest.STATE)
            found |= to_device(errand.hear(), self._comm.device)
        for local in self._local:
            found |= local.desk.master.state()
        return found

    def load(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Has servers go on from the model's weights, and from what optimisers have kept."""
        self._optimizer.state.clear()  # It steps nothing.
        self._comm.smallest(0)
        for local in self._local:
            weights = [parameter.detach() for parameter in local.link.parameters]
            local.desk.master.load(weights, to_device(kept, self._comm.device))
        if self._comm.rank == 0:
            for errand in self._errands:
                errand.say(ServerRequest.LOAD)
                errand.link.give(errand.link.home, self._quiet)
                own = {name: kept.get(name, {}) for name in errand.link.names}
                with naming_peer(errand.link.home):
                    send_json_message(own, errand.link.home, self._quiet, STATES)
        self.finish()

    def figures(self) -> dict[str, Any]:
        """How old gradients were when they came to a server, over all servers."""
        return {"staleness": self._staleness().summary() | {"bound": self._bound.max_staleness or None}}

    def _staleness(self) -> Staleness:
        total = Staleness()
        for errand in self._errands:
            errand.say(ServerRequest.FIGURES)
            told = errand.hear()
            total.add(Staleness.of(json.loads(told["staleness"]["json"])))
        for local in self._local:
            total.add(local.desk.master.staleness)
        return total

    def abandon(self) -> None:
        """Leaves after an error: who asks the server on this rank from now on gets to know that it has failed."""
        for local in self._local:
            local.desk.master.fail(RankError("its rank has failed.", peer_lost=True))
        self._leave()

    def close(self) -> None:
        """Leaves; a server on this rank stays until all others have left too."""
        self._leave()
        for local in self._local:
            local.desk.close()

    def _leave(self) -> None:
        for errand in (*self._errands, *self._idle):
            with suppress(RankError):  # A server that is gone needs no farewell.
                errand.say(ServerRequest.LEAVE)


class LocalServerClient:
    """A worker's way to the server on its own rank."""

    def __init__(self, link: ServerShard, desk: AsyncServer, comm: Comm) -> None:
        self.link = link
        self.desk = desk
        self._comm = comm
        self._answer = ServerReply(0, comm.rank)

    def push(self, settings: Sequence[float]) -> None:
        self.link.gradients.pack([parameter.grad for parameter in self.link.parameters])
        self._answer = self.desk.master.push(
            self.link.gradients.views, self.link.used, settings, self._answer.version, self.link.weights
        )

    def pull(self) -> None:
        self._answer = self.desk.master.pull(self.link.weights)

    def take(self) -> ServerReply:
        self.link.take()
        return self._answer

"""Servers that answer each worker by itself: no worker waits for another, and a gradient may be older than the weights.

A server has a thread per worker, which waits for that worker's word and does what it says; a lock keeps them from
stepping at the same time. Worker and server on one rank talk by function calls. A server keeps weights of its own, even
beside a worker: the worker's must not change while it computes with them.
"""

from __future__ import annotations

import enum
import json
import math
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.comm.packet import Packet, receive_patiently
from paceline.comm.parcel import receive_parcel, send_parcel
from paceline.comm.timed import TimedGroup
from paceline.errors import RankError
from paceline.strategies.base import MakeOptimizer, NamedParameters
from paceline.strategies.server_rounds import GRADIENTS, STATES, WEIGHTS, WORDS, Link, copies, kept_for, to_device

ANSWERS = WORDS + 1
"""One more tag: what a worker is told before it gets weights."""
POLL_S = 0.2
"""How often a server on a rank of its own looks whether all have left."""


class Say(enum.IntEnum):
    """What a worker wants of a server."""

    PUSH = 0
    """Here are gradients; give me weights."""
    PULL = 1
    """Give me weights."""
    STATE = 2
    """Give me what your optimiser keeps."""
    LOAD = 3
    """Here are weights, and what your optimiser shall keep."""
    FIGURES = 4
    """Tell me how old gradients were."""
    WHY = 5
    """Tell me why you have failed."""
    LEAVE = 6
    """I shall not ask again."""


class Answer(NamedTuple):
    """What comes with weights."""

    version: int
    """How many updates they have had."""
    ticket: int
    """Which share of which step the worker shall train next; the first server's alone counts."""
    failed: bool = False
    """The server has failed, or has lost a worker: the weights say nothing."""


@dataclass
class Ages:
    """How old gradients were when they came, in updates of the server since the weights they were computed with."""

    counts: Counter[int] = field(default_factory=Counter)
    damped: int = 0
    dropped: int = 0

    def add(self, other: Ages) -> None:
        """Counts another server's too."""
        self.counts.update(other.counts)
        self.damped += other.damped
        self.dropped += other.dropped

    def summary(self) -> dict[str, Any]:
        """For a record."""
        ages = sorted(self.counts.elements())
        return {
            "gradients": len(ages),
            "mean": sum(ages) / len(ages) if ages else None,
            "median": ages[len(ages) // 2] if ages else None,
            "max": ages[-1] if ages else None,
            "damped": self.damped,
            "dropped": self.dropped,
            "counts": [[age, self.counts[age]] for age in sorted(self.counts)],
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "counts": {str(age): n for age, n in self.counts.items()},
            "damped": self.damped,
            "dropped": self.dropped,
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> Ages:
        """The other way."""
        return cls(Counter({int(age): n for age, n in values["counts"].items()}), values["damped"], values["dropped"])


@dataclass(frozen=True)
class Bound:
    """What becomes of gradients that are too old."""

    max_age: int
    """In versions; 0 is no bound."""
    drops: bool

    def factor(self, age: int) -> float:
        """What a gradient is multiplied by: less the older it is beyond the bound, or nothing then."""
        if not self.max_age or age <= self.max_age:
            return 1.0
        return 0.0 if self.drops else self.max_age / age


class Master:
    """The weights of one server, and all that is done with them."""

    def __init__(
        self, named: NamedParameters, optimizer: torch.optim.Optimizer, workers: int, bound: Bound, first_ticket: int
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.optimizer = optimizer
        self.ages = Ages()
        self.failure: Exception | None = None
        """Why the weights say nothing any more."""
        self.has_failed = threading.Event()
        self._workers = workers
        self._bound = bound
        self._version = 0
        self._ticket = first_ticket
        self._lock = threading.Lock()

    def push(
        self, gradients: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float], version: int, into: Packet
    ) -> Answer:
        """Steps by one worker's gradients, and packs the weights that come of it.

        Each is a share of a global batch, so it is stepped at 1 ÷ workers of the learning rate: that many updates go as
        far as one step of all, weight decay and optimisers that pass over a gradient's size included.
        """
        with self._lock:
            age = self._version - version
            self.ages.counts[age] += 1
            factor = self._bound.factor(age)
            if factor:
                self.ages.damped += factor < 1
                self._try_to_step(gradients, used, rates, factor)
            else:
                self.ages.dropped += 1
            ticket, self._ticket = self._ticket, self._ticket + 1
            return self._give(into, ticket)

    def pull(self, into: Packet) -> Answer:
        """Packs the weights as they are."""
        with self._lock:
            return self._give(into, -1)

    def load(self, weights: Sequence[Tensor], kept: Mapping[str, dict[str, Any]]) -> None:
        """Goes on from other weights, and from what another optimiser has kept."""
        with self._lock, torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], list(weights))
            for name, parameter in zip(self.names, self.parameters, strict=True):
                self.optimizer.state[parameter] = copies(kept.get(name, {}))

    def state(self) -> dict[str, dict[str, Any]]:
        """What the optimiser keeps."""
        with self._lock:
            return kept_for(self.names, self.parameters, self.optimizer)

    def _give(self, into: Packet, ticket: int) -> Answer:
        into.pack([parameter.detach() for parameter in self.parameters])
        return Answer(self._version, ticket, failed=self.failure is not None)

    def _try_to_step(
        self, gradients: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float], factor: float
    ) -> None:
        """Steps; where that fails, whoever asks gets to know it, and the rank that it happens on raises it."""
        try:
            self._step(gradients, used, rates, factor)
        except Exception as error:
            self.fail(error)

    def fail(self, failure: Exception) -> None:
        """Has whoever asks get to know that it has failed; the first reason counts."""
        self.failure = self.failure or failure
        self.has_failed.set()

    def why(self) -> dict[str, Any]:
        """Why it has failed, in words that can be sent."""
        assert self.failure is not None
        known = isinstance(self.failure, RankError)
        return {
            "reason": str(self.failure) if known else f"{type(self.failure).__name__}: {self.failure}",
            "detail": None if known else "".join(traceback.format_exception(self.failure)).rstrip(),
            "peer_lost": isinstance(self.failure, RankError) and self.failure.peer_lost,
        }

    def _step(self, gradients: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float], factor: float) -> None:
        if factor < 1:  # By the gradient and not the rate: that momentum keeps it so.
            torch._foreach_mul_(list(gradients), factor)
        for parameter, gradient, there in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if there else None
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate / self._workers
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self._version += 1


class Desk:
    """A server that is open: a thread for each worker on another rank."""

    def __init__(self, master: Master, workers: Sequence[int], comm: Comm, group: dist.ProcessGroup) -> None:
        self.master = master
        self._group = group
        self._device = comm.device
        self._timeout_s = comm.timeout_s
        self._threads = [
            threading.Thread(target=self._attend, args=(rank,), name=f"paceline-server-{rank}", daemon=True)
            for rank in workers
        ]
        for thread in self._threads:
            thread.start()

    def serve(self) -> None:
        """Stays until all workers have left; raises when it has failed, or one is lost."""
        while any(thread.is_alive() for thread in self._threads):
            if self.master.has_failed.wait(POLL_S):
                assert self.master.failure is not None
                raise self.master.failure

    def close(self) -> None:
        """Returns when all workers have left, or when one has kept silent for too long."""
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _attend(self, rank: int) -> None:
        """Serves one worker until it leaves."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._serve(rank)
        except Exception as error:  # The others hear of it with their next answer.
            self.master.fail(RankError(f"it has lost rank {rank}: {error}", peer_lost=True))

    def _serve(self, rank: int) -> None:
        master, group = self.master, self._group
        weights = [parameter.detach() for parameter in master.parameters]
        gradients, reply = Packet(weights, self._device), Packet(weights, self._device)
        word, quiet = blank_word(master), untimed(group)
        while True:
            receive_patiently(word, rank, quiet, WORDS)  # How long a worker computes is no traffic.
            say, version, rates, used = read_word(word, master)
            if say is Say.LEAVE:
                return
            if say is Say.PUSH:
                gradients.receive(rank, group, GRADIENTS).wait()
                _answer(rank, master.push(gradients.views, used, rates, version, reply), reply, group)
            elif say is Say.PULL:
                _answer(rank, master.pull(reply), reply, group)
            elif say is Say.STATE:
                send_parcel(master.state(), rank, quiet, STATES)
            elif say is Say.WHY:
                send_parcel({"why": master.why()}, rank, quiet, STATES)
            elif say is Say.FIGURES:
                send_parcel({"ages": {"json": json.dumps(master.ages.to_dict())}}, rank, quiet, STATES)
            else:
                gradients.receive(rank, quiet, WEIGHTS).wait()
                master.load(gradients.views, to_device(receive_parcel(rank, quiet, STATES), self._device))


class Errand:
    """What a worker has under way with one server."""

    def __init__(self, link: Link, group: dist.ProcessGroup, groups: int) -> None:
        self.link = link
        self.version = 0
        """Of the weights that the worker has from it."""
        self._group = group
        self._answer = torch.zeros(len(Answer._fields), dtype=torch.int64)
        self._word = torch.zeros(2 + groups + len(link.names), dtype=torch.float64)
        self._arriving: list[Any] = []
        self._leaving: list[Any] = []

    def push(self, rates: Sequence[float], used: Sequence[bool]) -> None:
        """Starts sending gradients, and receiving weights for them."""
        self._expect()
        self.say(Say.PUSH, rates, used)
        self._leaving.append(self.link.push(self._group))

    def pull(self) -> None:
        """Starts receiving weights."""
        self._expect()
        self.say(Say.PULL)

    def take(self) -> Answer:
        """Waits for the weights, and puts them into the model."""
        for message in self._arriving:
            message.wait()
        self.link.take()
        for message in self._leaving:
            message.wait()
        version, ticket, failed = self._answer.tolist()
        self.version = version
        return Answer(version, ticket, bool(failed))

    def say(self, what: Say, rates: Sequence[float] = (), used: Sequence[bool] = ()) -> None:
        """Tells the server what comes."""
        word = [float(what), float(self.version), *rates, *map(float, used)]
        self._word[: len(word)] = torch.tensor(word, dtype=torch.float64)
        dist.send(self._word, group_dst=self.link.home, group=self._group, tag=WORDS)

    def _expect(self) -> None:
        home, group = self.link.home, self._group
        answer = dist.irecv(self._answer, group_src=home, group=group, tag=ANSWERS)
        self._arriving, self._leaving = [answer, self.link.weights.receive(home, group, WEIGHTS)], []


class AtWill:
    """A worker under servers that answer each by itself, and the server on its rank if there is one."""

    def __init__(
        self,
        links: Sequence[Link],
        parameters: NamedParameters,
        optimizer: torch.optim.Optimizer,
        make_optimizer: MakeOptimizer,
        comm: Comm,
        group: dist.ProcessGroup,
        bound: Bound,
    ) -> None:
        self._bound = bound
        self.ticket = comm.rank
        """The share that this worker trains next: at first the one that is its own anyway."""
        self._comm = comm
        self._links = links
        self._parameters = parameters
        self._optimizer = optimizer
        here = [link for link in links if link.home == comm.rank]
        for link in links if comm.servers and comm.rank == 0 else []:
            link.give(link.home, group)
        desks = [_open_desk(link, parameters, make_optimizer, comm, group, bound) for link in here]
        self._local = [_Local(link, desk, comm) for link, desk in zip(here, desks, strict=True)]
        groups = len(optimizer.param_groups)
        self._errands = [Errand(link, group, groups) for link in links if link.home != comm.rank and link.names]
        self._quiet = untimed(group)

    def step(self, max_norm: float | None) -> None:
        """Sends gradients to all servers, and goes on with the weights that they have then."""
        if max_norm is not None:  # Each worker its own: there is no gradient of all to clip.
            nn.utils.clip_grad_norm_([parameter for _, parameter in self._parameters], max_norm)
        rates = [float(group.get("lr", math.nan)) for group in self._optimizer.param_groups]
        for errand in self._errands:
            errand.push(rates, errand.link.used)
        for local in self._local:
            local.push(rates)
        answers = self._take()
        self.ticket = next(answer.ticket for home, answer in answers if home == self._links[0].home)
        self._comm.agreed()
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

    def _take(self) -> list[tuple[int, Answer]]:
        answers = [(errand.link.home, errand.take()) for errand in self._errands]
        answers += [(local.link.home, local.take()) for local in self._local]
        for local in self._local:
            if local.desk.master.failure is not None:
                raise local.desk.master.failure
        for errand, (_, answer) in zip(self._errands, answers, strict=False):
            if answer.failed:
                raise self._failure_of(errand)
        return answers

    def _failure_of(self, errand: Errand) -> RankError:
        errand.say(Say.WHY)
        why = receive_parcel(errand.link.home, self._quiet, STATES)["why"]
        message = f"the server on rank {errand.link.home} has failed: {why['reason']}"
        return RankError(message, detail=why["detail"], peer_lost=why["peer_lost"])

    def state(self) -> dict[str, dict[str, Any]]:
        """What all servers' optimisers keep."""
        found: dict[str, dict[str, Any]] = {}
        for errand in self._errands:
            errand.say(Say.STATE)
            found |= to_device(receive_parcel(errand.link.home, self._quiet, STATES), self._comm.device)
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
                errand.say(Say.LOAD)
                errand.link.give(errand.link.home, self._quiet)
                own = {name: kept.get(name, {}) for name in errand.link.names}
                send_parcel(own, errand.link.home, self._quiet, STATES)
        self.finish()

    def figures(self) -> dict[str, Any]:
        """How old gradients were when they came to a server, over all servers."""
        return {"ages": self._ages().summary() | {"bound": self._bound.max_age or None}}

    def _ages(self) -> Ages:
        total = Ages()
        for errand in self._errands:
            errand.say(Say.FIGURES)
            told = receive_parcel(errand.link.home, self._quiet, STATES)
            total.add(Ages.of(json.loads(told["ages"]["json"])))
        for local in self._local:
            total.add(local.desk.master.ages)
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
        for errand in self._errands:
            with suppress(RuntimeError):  # A server that is gone needs no farewell.
                errand.say(Say.LEAVE)


class _Local:
    """A worker's way to the server on its own rank."""

    def __init__(self, link: Link, desk: Desk, comm: Comm) -> None:
        self.link = link
        self.desk = desk
        self._comm = comm
        self._answer = Answer(0, comm.rank)

    def push(self, rates: Sequence[float]) -> None:
        self.link.gradients.pack([parameter.grad for parameter in self.link.parameters])
        self._answer = self.desk.master.push(
            self.link.gradients.views, self.link.used, rates, self._answer.version, self.link.weights
        )

    def pull(self) -> None:
        self._answer = self.desk.master.pull(self.link.weights)

    def take(self) -> Answer:
        self.link.take()
        return self._answer


def desk_of_its_own(link: Link, optimizer: torch.optim.Optimizer, comm: Comm, bound: Bound) -> Desk:
    """A server on a rank of its own: it steps the parameters of its own model."""
    link.fetch(0, comm.everyone)
    named = list(zip(link.names, link.parameters, strict=True))
    master = Master(named, optimizer, comm.world_size, bound, first_ticket=comm.world_size)
    return Desk(master, range(comm.world_size) if link.names else (), comm, comm.everyone)


def _open_desk(
    link: Link,
    parameters: NamedParameters,
    make_optimizer: MakeOptimizer,
    comm: Comm,
    group: dist.ProcessGroup,
    bound: Bound,
) -> Desk:
    """A server beside a worker, with weights of its own.

    Its optimiser is made for all parameters, so that it has the worker's groups; but only those that it keeps take
    memory, and only they are ever stepped.
    """
    kept = set(link.names)
    own = [(name, nn.Parameter(p.detach().clone() if name in kept else _hollow(p))) for name, p in parameters]
    masters = [(name, parameter) for name, parameter in own if name in kept]
    master = Master(masters, make_optimizer(own), comm.world_size, bound, first_ticket=comm.world_size)
    others = [rank for rank in range(comm.world_size) if rank != comm.rank and link.names]
    return Desk(master, others, comm, group)


def _hollow(parameter: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory."""
    return parameter.detach().new_zeros(()).expand(parameter.shape)


def untimed(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group inside one that is timed."""
    return group.inner if isinstance(group, TimedGroup) else group


def blank_word(master: Master) -> Tensor:
    """Room for what a worker says."""
    return torch.zeros(2 + len(master.optimizer.param_groups) + len(master.names), dtype=torch.float64)


def read_word(word: Tensor, master: Master) -> tuple[Say, int, list[float], list[bool]]:
    """What a worker wants, the version of its weights, its learning rates, and which parameters have gradients."""
    say, version, *rest = word.tolist()
    groups = len(master.optimizer.param_groups)
    return Say(int(say)), int(version), rest[:groups], [flag > 0 for flag in rest[groups:]]


def _answer(rank: int, answer: Answer, weights: Packet, group: dist.ProcessGroup) -> None:
    told = dist.isend(torch.tensor(answer), group_dst=rank, group=group, tag=ANSWERS)
    assert told is not None
    told.wait()
    for message in weights.send([rank], group, WEIGHTS):
        message.wait()

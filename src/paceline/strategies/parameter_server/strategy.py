"""`parameter_server`: servers keep the weights and step them, workers send gradients and get weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from paceline.comm.group import Comm
from paceline.errors import UsageError
from paceline.plans.parameter_server import shards
from paceline.strategies.base.strategy import MakeOptimizer, Role, State, Strategy
from paceline.strategies.parameter_server.async_server import AsyncServer, dedicated_server
from paceline.strategies.parameter_server.async_worker import AsyncWorker
from paceline.strategies.parameter_server.staleness import StalenessBound
from paceline.strategies.parameter_server.synchronous import ServerShard, SyncServer, SyncWorker

ROUNDS_WITHIN_BOUND = 4
"""A gradient is as old as the updates of all others while it was computed: of even workers, one less than workers."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """How many servers, where, and whether workers wait for each other."""

    servers: int = 1
    """How many ranks keep weights: each has whole tensors, about as many bytes as the others."""
    extra: bool = False
    """Put servers on ranks of their own, the last ones, which do not train; else they sit beside the first workers."""
    asynchronous: bool = False
    """Let no worker wait for another: a server steps by each gradient as it comes, and answers at once."""
    max_staleness: int | None = None
    """Asynchronous: how many updates old a gradient may be; 0 is no bound, none is four times the workers."""
    late: Literal["damp", "drop"] = "damp"
    """Asynchronous: what becomes of an older one; damped, it counts max_staleness ÷ its age."""

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UsageError(f"parameter_server:servers is {self.servers}.", hint="it has to be 1 or more")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(
                f"parameter_server:max_staleness is {self.max_staleness}.", hint="it has to be 0, no bound, or more"
            )
        if not self.asynchronous and (self.max_staleness is not None or self.late != "damp"):
            raise UsageError(
                "parameter_server:max_staleness and late are about gradients that come late, and in step none does.",
                hint="add asynchronous=true, or leave them out",
            )


class ParameterServer(Strategy):
    """Servers keep the weights and step the optimiser; workers send them gradients and get new weights.

    Idea
        The weights live in one place, or in k: each tensor is kept by one server, which alone has its optimiser's
        state. A worker sends every server the gradients of its tensors in one message. When those of all workers are
        there, the server adds them in the order of ranks, steps, and sends everybody the weights. No worker talks to
        another. Servers sit beside the first workers, where a worker reaches its own by a function call, or with
        extra=true on the last ranks, which do not train.

        With asynchronous=true nobody waits: the server steps by each gradient as it comes, counting it 1 ÷ workers, and
        answers with the weights of that moment and a ticket, the next share of the data that nobody has yet. A fast
        worker takes more of them. The price is age: meanwhile others have stepped, so a gradient belongs to weights
        that are some updates old. Those older than max_staleness are damped or dropped, and
        counted. Nothing is clipped then: no rank ever has the gradient of a whole batch.

    Who sends what to whom (k = 2, of M bytes; server A keeps a half of them, server B the other)
        worker 0 ──½g0──▶             ◀──½w── server A
        worker 1 ──½g1──▶ server A    each sums, steps its half of the weights,
        worker 2 ──½g2──▶ server B    and sends it to every worker
        worker 3 ──½g3──▶             ◀──½w── server B

    Cost
        The larger of worker and server traffic over the link: a worker moves M bytes up and M down, a server (p−1)·M/k
        up and as much down, so 2α + max(M, (p−1)·M/k)·β each way; with k = p it is that of an all-reduce.

    When to use it
        Asynchronous, where some ranks are much slower than others: all-reduce goes at the pace of the slowest. Lower
        the momentum then (--momentum 0.5): gradients that come late push on in an old direction, as momentum does. In
        step, with as many servers as ranks, where optimiser state is large: each keeps its part alone.

    When not
        On even ranks: all-reduce moves as little and its gradients are never old. Asynchronous with a momentum of 0.9:
        in 12 seconds, 4 workers got `cnn` on CIFAR-10 to an accuracy of 25 to 28%, and under `ddp` to 50 to 53%. With
        one server for many workers all traffic goes through its link, as in `gather_scatter`.

    Source
        Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; asynchronous: Dean et
        al., "Large Scale Distributed Deep Networks", NIPS 2012; bounded age: Ho et al., "More Effective Distributed ML
        via a Stale Synchronous Parallel Parameter Server", NIPS 2013; damping: Zhang et al., "Staleness-aware
        Async-SGD for Distributed Deep Learning", IJCAI 2016; momentum: Mitliagkas et al., "Asynchrony begets Momentum,
        with an Application to Deep Learning", Allerton 2016.
    """

    name: ClassVar[str] = "parameter_server"
    travel = "packed"
    Options: ClassVar[type] = ParameterServerOptions

    _exchange: SyncWorker | AsyncWorker | None = None
    """On ranks that train."""
    _server: SyncServer | AsyncServer | None = None
    """On ranks that do not."""

    def __init__(self, options: ParameterServerOptions | None = None) -> None:
        super().__init__(options)
        self.lockstep = self.lossless = not self.options.asynchronous
        if not self.lockstep:
            self.supports -= {"clip"}  # No rank ever has the gradient of a whole batch, whose norm it is about.

    def roles(self, world_size: int) -> list[Role]:
        servers = min(self.options.servers, world_size - 1) if self.options.extra else 0
        return [Role.WORKER] * (world_size - servers) + [Role.SERVER] * servers

    def check_ranks(self, world_size: int) -> None:
        servers, extra = self.options.servers, self.options.extra
        if servers >= world_size + (not extra):
            left = "leaves none to train" if extra else "is more than there are: servers sit beside the first of them"
            raise UsageError(
                f"parameter_server:servers={servers} of {world_size} ranks {left}.",
                hint="use fewer servers, or more ranks",
            )

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Comm) -> nn.Module:
        options: ParameterServerOptions = self.options
        self.check_ranks(comm.world_size + comm.servers)
        module = super().attach(model, make_optimizer, comm)
        kept = shards([parameter.nbytes for _, parameter in self.parameters], options.servers)
        first = comm.world_size if options.extra else 0
        links = [
            ServerShard(first + server, [self.parameters[number] for number in numbers], comm.device)
            for server, numbers in enumerate(kept)
        ]
        max_staleness = (
            ROUNDS_WITHIN_BOUND * comm.world_size if options.max_staleness is None else options.max_staleness
        )
        bound = StalenessBound(max_staleness, drops=options.late == "drop")
        if comm.is_server:
            own = links[comm.rank - first]
            serving = dedicated_server(own, self.optimizer, comm, bound) if options.asynchronous else None
            self._server = serving or SyncServer(own, self.optimizer, comm, self._update)
            return module
        group = comm.full_group
        if not comm.servers and comm.backend != "gloo":  # NCCL takes neither messages of threads nor main memory.
            group = comm.subgroup(range(comm.world_size), backend="gloo")
        if options.asynchronous:
            self._exchange = AsyncWorker(links, self.parameters, self.optimizer, make_optimizer, comm, group, bound)
        else:
            self._exchange = SyncWorker(links, self.optimizer, comm, group, self._update)
        return module

    def serve(self) -> None:
        assert self._server is not None
        self._server.serve()

    def step(self, max_norm: float | None = None) -> None:
        self.gradients()  # All are there, or filled up, or an error names them.
        self._training.step(max_norm)

    def finish(self) -> None:
        self._training.finish()

    @property
    def ticket(self) -> int:
        training = self._training
        return training.ticket if isinstance(training, AsyncWorker) else super().ticket

    def state(self) -> State:
        return State(super().state().model, self._training.state())

    def load(self, state: State) -> list[str]:
        unused = super().load(state)
        self._training.load(state.optimizer)
        return unused

    def figures(self) -> dict[str, Any]:
        return self._training.figures()

    def abandon(self) -> None:
        if self._exchange is not None:
            self._exchange.abandon()
        self._forget()

    def close(self) -> None:
        try:
            if self._exchange is not None:
                self._exchange.close()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._exchange = self._server = None
        super().close()

    @property
    def _training(self) -> SyncWorker | AsyncWorker:
        assert self._exchange is not None, "this rank does not train"
        return self._exchange

    def _update(self) -> None:
        self.update(None)

    def _fill_unused(self) -> None:
        if self.lockstep:  # Else nobody waits to hear what others have used: servers are told by each.
            super()._fill_unused()

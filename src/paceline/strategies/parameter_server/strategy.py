"""`parameter_server`: servers keep the weights and step them; workers send gradients and receive weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm.group import Comm
from paceline.errors import UsageError
from paceline.plans.parameter_server import shards
from paceline.strategies.base.scaling import unscale
from paceline.strategies.base.strategy import MakeOptimizer, Role, State, Strategy
from paceline.strategies.parameter_server.asynchronous import AsyncServer, AsyncWorker
from paceline.strategies.parameter_server.load_hooks import LoadHooks
from paceline.strategies.parameter_server.server import Server, ServerSetup
from paceline.strategies.parameter_server.server_shard import ServerShard
from paceline.strategies.parameter_server.staleness import StalenessLimit
from paceline.strategies.parameter_server.synchronous import SyncServer, SyncWorker
from paceline.strategies.parameter_server.worker import Worker

DEFAULT_STALENESS_PER_WORKER = 4
"""Default of max_staleness per worker. With p equally fast workers, the staleness is about p−1."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """Number and place of servers, and whether workers wait for each other."""

    servers: int = 1
    """Number of servers. Each keeps whole tensors, of about the same number of bytes in total."""
    extra: bool = False
    """Put servers on separate ranks, the last ones, which do not train. With false, the first workers also serve."""
    asynchronous: bool = False
    """Let no worker wait for another: a server steps with each gradient when it arrives, and replies at once."""
    max_staleness: int | None = None
    """Largest staleness of a gradient, in updates, if asynchronous: 0 for no limit, by default 4 × workers."""
    over_limit: Literal["damp", "drop"] = "damp"
    """Treatment of a gradient above max_staleness: drop it, or damp it by the factor max_staleness ÷ staleness."""

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UsageError(f"parameter_server:servers is {self.servers}.", hint="set it to 1 or more")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(
                f"parameter_server:max_staleness is {self.max_staleness}.",
                hint="set it to 1 or more, or to 0 for no limit",
            )
        if not self.asynchronous and (self.max_staleness is not None or self.over_limit != "damp"):
            raise UsageError(
                "parameter_server:max_staleness and over_limit have no effect without asynchronous=true: "
                "synchronous gradients are never stale.",
                hint="add asynchronous=true, or leave them out",
            )

    def staleness_limit(self, workers: int) -> StalenessLimit:
        """Return the limit on the staleness of gradients."""
        default = DEFAULT_STALENESS_PER_WORKER * workers
        return StalenessLimit(
            default if self.max_staleness is None else self.max_staleness, drops=self.over_limit == "drop"
        )


class ParameterServer(Strategy):
    """Servers keep the weights and step the optimiser; workers send them gradients and receive new weights.

    Idea
        The weights are divided among k servers: each tensor and its optimiser state are kept by one server. A worker
        sends each server the gradients of that server's tensors in one message. When the gradients of all workers have
        arrived, the server averages them in rank order, steps, and sends the new weights to all workers. Workers
        exchange no messages with each other. By default, the first k workers are also servers, and reach their own
        server by a function call. With extra=true, the servers are on the last ranks, which do not train.

        With asynchronous=true, no worker waits for another. The server steps with each gradient when it arrives, at
        1 ÷ workers of the learning rate. It replies with its current weights and a ticket: the next share of the data
        that no worker has yet. A fast worker gets more tickets. The drawback is staleness: while a worker computes a
        gradient, other workers update the weights, so the gradient belongs to weights that are some updates old.
        Gradients with a staleness above max_staleness are damped or dropped, and counted. Clipping is not supported,
        because no rank has the gradient of a whole batch.

    Who sends what to whom (k = 2, M bytes; server A keeps one half of the tensors, server B the other)
        worker 0 ──½g0──▶             ◀──½w── server A
        worker 1 ──½g1──▶ server A    each averages, steps its half of the weights,
        worker 2 ──½g2──▶ server B    and sends it to every worker
        worker 3 ──½g3──▶             ◀──½w── server B

    Cost
        A worker sends M bytes and receives M; a server beside a worker receives (p−1)·M/k bytes and sends as many. The
        larger of the two limits the step: 2α + max(M, (p−1)·M/k)·β each way. With k = p, this is the cost of an
        all-reduce.

    When to use it
        Asynchronous: if some ranks are much slower than others, because an all-reduce runs at the speed of the slowest.
        Lower the momentum (--momentum 0.5), because stale gradients act like additional momentum. Synchronous, with as
        many servers as ranks: if the optimiser state is large, because each server keeps only its own part.

    When not to use it
        On equally fast ranks with large gradients: all traffic uses the servers' links, while an all-reduce spreads it
        over all links (`vgg11` at 1 Gbit/s: 2.7 times as long as `ddp`). With small gradients it may be faster than
        `ddp`; docs/results.md has both. Asynchronous with a momentum of 0.9: in 12 seconds, 4 workers trained `cnn` on
        CIFAR-10 to an accuracy of 25 to 28%, against 50 to 53% with `ddp`.

    Source
        Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; asynchronous: Dean et
        al., "Large Scale Distributed Deep Networks", NIPS 2012; bounded staleness: Ho et al., "More Effective
        Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013; damping: Zhang et al.,
        "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016; momentum: Mitliagkas et al., "Asynchrony
        begets Momentum, with an Application to Deep Learning", Allerton 2016.
    """

    name: ClassVar[str] = "parameter_server"
    sends = "packed"
    Options: ClassVar[type] = ParameterServerOptions

    _worker: Worker | None = None
    """Worker of this rank; None on ranks that do not train."""
    _server: Server | None = None
    """Server of this rank; None on ranks that train."""
    _hooks: LoadHooks | None = None
    """Hooks on model and optimiser; None on ranks that do not train."""

    def __init__(self, options: ParameterServerOptions | None = None) -> None:
        super().__init__(options)
        self.lockstep = self.lossless = not self.options.asynchronous
        if not self.lockstep:
            self.supports -= {"clip", "scaler"}  # No rank has the gradient of a whole batch to take the norm of.

    def roles(self, world_size: int) -> list[Role]:
        servers = min(self.options.servers, world_size - 1) if self.options.extra else 0
        return [Role.WORKER] * (world_size - servers) + [Role.SERVER] * servers

    def check_ranks(self, world_size: int) -> None:
        """Raise a UsageError if there are too many servers for the ranks."""
        servers, extra = self.options.servers, self.options.extra
        if servers >= world_size + (not extra):
            problem = "leaves no rank to train" if extra else "is more than one server per rank"
            raise UsageError(
                f"parameter_server:servers={servers} with {world_size} ranks {problem}.",
                hint="use fewer servers or more ranks",
            )

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Comm) -> nn.Module:
        options: ParameterServerOptions = self.options
        self.check_ranks(comm.world_size + comm.servers)
        module = super().attach(model, make_optimizer, comm)
        kept = shards([parameter.nbytes for _, parameter in self.parameters], options.servers)
        first = comm.world_size if options.extra else 0
        all_shards = [
            ServerShard(
                first + server,
                [self.parameters[number] for number in numbers],
                comm.device,
                has_marks=not options.asynchronous,
            )
            for server, numbers in enumerate(kept)
        ]
        group = comm.full_group
        if not comm.servers and comm.backend != "gloo":
            # NCCL supports neither main memory nor messages from several threads.
            group = comm.subgroup(range(comm.world_size), backend="gloo")
        setup = ServerSetup(
            shards=all_shards,
            parameters=self.parameters,
            optimizer=self.optimizer,
            make_optimizer=make_optimizer,
            comm=comm,
            group=group,
            update=self._update,
            report_mean=self._report_shard,
            limit=options.staleness_limit(comm.world_size),
        )
        if comm.is_server:
            server: type[Server] = AsyncServer if options.asynchronous else SyncServer
            self._server = server.on_separate_rank(all_shards[comm.rank - first], setup)
        else:
            self._worker = AsyncWorker(setup) if options.asynchronous else SyncWorker(setup)
            self._hooks = LoadHooks(model, self.optimizer, self._worker)
        return module

    def serve(self) -> None:
        """Serve the workers until they close."""
        assert self._server is not None
        self._server.serve()

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        self.gradients()  # Raises for missing gradients, or sets them to zero where unused parameters are allowed.
        if scaler is not None and unscale(scaler, self):
            for _, parameter in self.parameters:
                parameter.grad = None
            return  # No worker sends anything: a server on a separate rank waits for the next request.
        self._training_worker.step(max_norm)

    def finish(self) -> None:
        self._training_worker.finish()

    def next_ticket(self) -> int:
        """Return the share of the data that this rank trains next, if asynchronous."""
        ticket = self._training_worker.ticket
        assert ticket is not None, "all ranks step together"
        return ticket

    def state(self) -> State:
        return State(super().state().model, self._training_worker.state())

    def load(self, state: State) -> list[str]:
        assert self._hooks is not None, "this rank does not train"
        with self._hooks.paused():
            unused = super().load(state)
        self._training_worker.load(state.optimizer)
        return unused

    def metrics(self) -> dict[str, Any]:
        """Return the staleness of gradients, if asynchronous."""
        return self._training_worker.metrics()

    def abandon(self) -> None:
        if self._worker is not None:
            self._worker.abandon()
        self._detach()

    def close(self) -> None:
        try:
            if self._worker is not None:
                self._worker.close()
        finally:
            self._detach()

    def _detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._worker = self._server = self._hooks = None
        super().close()

    @property
    def _training_worker(self) -> Worker:
        assert self._worker is not None, "this rank does not train"
        return self._worker

    def _update(self) -> None:
        self.update(None)

    def report_mean(self, gradients: Sequence[Tensor]) -> None:
        """Do nothing: a server reports the mean of its shard before it clips."""

    def _report_shard(self, gradients: Sequence[Tensor]) -> None:
        if self.on_mean is not None and gradients:
            self.on_mean(gradients)

    def why_no_mean(self) -> str | None:
        """Return a sentence if only servers on separate ranks have the mean gradient."""
        if self.options.extra:
            return "Under parameter_server:extra=true, only servers have the mean gradient, and they do not train."
        return None

    def _fill_unused(self) -> None:
        if self.lockstep:  # Asynchronous workers do not wait for each other: each sends servers its own flags.
            super()._fill_unused()

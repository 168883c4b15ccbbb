"""The process groups of one run: one for its strategy's traffic, one for the loop's own bookkeeping."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.hosts import hosts_of, own_host
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.comm.local_group import NewGroup, local_maker
from paceline.comm.timed_group import TimedGroup, carrying, end_group, timed_group
from paceline.measure.operations import OperationLog
from paceline.measure.sockets import SocketName, connections, open_sockets
from paceline.measure.steps import Stopwatch
from paceline.records.timeline import NO_PEER, Purpose, RowKind


@dataclass(frozen=True)
class Comm:
    """What a strategy knows of the other ranks: those that take part in the run, counted from 0."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    """The strategy's. With a stopwatch every operation on it is timed."""
    control: dist.ProcessGroup
    """The loop's, for losses, counts and agreement between steps. It speaks Gloo, on CPU tensors."""
    backend: str = "gloo"
    """Who moves the bytes of `group`: gloo or nccl."""
    stopwatch: Stopwatch | None = None
    """What times this rank's steps; None where nobody measures."""
    timeout_s: float = 120.0
    subgroups: list[dist.ProcessGroup] = field(default_factory=list)
    """What `subgroup` has made, on this rank."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of subgroups, the same on all ranks."""
    sockets: set[SocketName] = field(default_factory=set)
    """Those that were opened for `group` and the subgroups: what goes over them is the strategy's. Gloo's alone."""
    servers: int = 0
    """Ranks that do not train, but keep parameters; they are numbered after those that do."""
    with_servers: dist.ProcessGroup | None = None
    """All of them in one group, where there are servers; Gloo's, timed as `group`."""
    server_ends: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The local and remote address of each connection of a server, and whose it is; on the others."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, in the order of their first ones; an emulated host is one. `open_comm` finds them out."""

    @property
    def everyone(self) -> dist.ProcessGroup:
        """For messages between any two of all: those that train, then those that keep parameters."""
        return self.group if self.with_servers is None else self.with_servers

    @property
    def serves(self) -> bool:
        """Whether this rank does not train, but keeps parameters."""
        return self.rank >= self.world_size

    def subgroup(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """A group of some of the run's ranks, whose operations are timed as those of `group`; `close_comm` ends it.

        Every rank of the run calls it, as `torch.distributed.new_group`; those that are not named get what that gives
        to such ranks.
        """
        members = sorted(ranks)
        in_world = [dist.get_global_rank(self.group, rank) for rank in members]
        is_whole = self.world_size == dist.get_world_size()
        make = dist.new_group if is_whole else local_maker(f"{self.group.group_name}-{next(self._numbers)}")
        before = open_sockets()
        group = _make_group(in_world, backend or self.backend, self.timeout_s, self._log, members, make)
        if self.rank in members:
            self.subgroups.append(group)
            self.sockets.update(_sockets_since(before, backend or self.backend))
        return group

    @property
    def step(self) -> int | None:
        """The step that goes on, where operations are noted."""
        return None if self._log is None else self._log.step

    def on_behalf_of(self, step: int | None) -> AbstractContextManager[None]:
        """Says, for the length of a `with`, for which step this thread sends: one that `step` gave, maybe long ago."""
        return nullcontext() if self._log is None or step is None else self._log.on_behalf_of(step)

    def idle(self) -> AbstractContextManager[None]:
        """The computing thread says so while it only waits for what another thread sends."""
        return nullcontext() if self._log is None else self._log.idle()

    def agreed(self) -> None:
        """A strategy says so when its gradients are agreed on and the optimiser starts."""
        if self.stopwatch is not None:
            self.stopwatch.agreed()

    def carrying(self, purpose: Purpose) -> AbstractContextManager[None]:
        """Says, for the length of a `with`, what is sent other than gradients."""
        return carrying(self.group, purpose)

    def sum(self, values: Tensor) -> Tensor:
        """Adds a small CPU tensor over the ranks."""
        return self._agree(values, dist.ReduceOp.SUM)

    def smallest(self, value: int) -> int:
        """The least of the ranks' values."""
        return int(self._agree(torch.tensor(value), dist.ReduceOp.MIN))

    def largest(self, value: float) -> float:
        """The greatest of the ranks' values."""
        return float(self._agree(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX))

    def any_of(self, flags: Tensor) -> Tensor:
        """Where any rank has a flag: small CPU tensors of 0 and 1."""
        return self._agree(flags, dist.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's small CPU tensor, on every rank."""
        everyone = [torch.empty_like(values) for _ in range(self.world_size)]
        with self._noted(RowKind.ALL_GATHER, values.nbytes * self.world_size):
            dist.all_gather(everyone, values, group=self.control)
        return everyone

    @property
    def own_groups(self) -> set[dist.ProcessGroup]:
        """Every group of the run, those inside timed ones too."""
        groups = {self.group, self.control, self.everyone, *self.subgroups}
        return groups | {group.inner for group in groups if isinstance(group, TimedGroup)}

    @property
    def is_timed(self) -> bool:
        """Whether operations are noted."""
        return self._log is not None

    @property
    def _log(self) -> OperationLog | None:
        return None if self.stopwatch is None else self.stopwatch.operations

    def _agree(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        with self._noted(RowKind.ALL_REDUCE, values.nbytes):
            dist.all_reduce(values, how, group=self.control)
        return values

    @contextmanager
    def _noted(self, kind: RowKind, size: int) -> Iterator[None]:
        """Notes an operation of the loop's group where a step is going on: ranks wait there for each other too."""
        log = self._log
        if log is None:
            yield
            return
        with log.carrying(Purpose.CONTROL):
            operation = log.start(kind, size, NO_PEER, blocking=True)
        yield
        if operation is not None:
            log.end(operation)


def open_comm(
    ranks: Sequence[int],
    *,
    device: torch.device,
    backend: str,
    timeout_s: float,
    stopwatch: Stopwatch | None = None,
    servers: Sequence[int] = (),
) -> Comm | None:
    """Makes the groups of a run among `ranks` of the world; called on every rank, None on those not among them.

    With a stopwatch that has a log of operations, what the strategy sends is noted there. `servers` are more ranks,
    which do not train; they have no part in `group` and `control`, nor a stopwatch.
    """
    before = open_sockets()
    log = None if stopwatch is None else stopwatch.operations
    group = _make_group(ranks, backend, timeout_s, log)
    sockets = _sockets_since(before, backend)
    control = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_s))
    before = open_sockets()
    everyone = _make_group([*ranks, *servers], "gloo", timeout_s, log) if servers else None
    to_servers = _sockets_since(before, "gloo") if servers else set()
    if dist.get_rank() not in (*ranks, *servers):
        return None
    comm = Comm(
        rank=[*ranks, *servers].index(dist.get_rank()),
        world_size=len(ranks),
        device=device,
        group=group,
        control=control,
        backend=backend,
        stopwatch=stopwatch if dist.get_rank() in ranks else None,
        timeout_s=timeout_s,
        sockets=sockets | to_servers,
        servers=len(servers),
        with_servers=everyone,
    )
    if servers:
        comm = replace(comm, server_ends=_server_ends(comm))
    return comm if comm.serves else replace(comm, hosts=hosts_of(comm.gather(own_host())))


def _server_ends(comm: Comm) -> dict[tuple[str, str], int]:
    """The connections of all servers, which these tell the others: they themselves count no bytes."""
    group, found = comm.everyone, dict[tuple[str, str], int]()
    if comm.serves:
        own = [[connection.local, connection.remote] for connection in connections(comm.sockets)]
        for rank in range(comm.world_size):
            send_json_message({"ends": {"as_json": json.dumps(own)}}, rank, group)
        return found
    for server in range(comm.world_size, comm.world_size + comm.servers):
        told = json.loads(receive_json_message(server, group)["ends"]["as_json"])
        found |= {(local, remote): server for local, remote in told}
    return found


def _sockets_since(before: frozenset[SocketName], backend: str) -> set[SocketName]:
    """The sockets of a group that was just made: Gloo connects all ranks at once, NCCL when it first needs to."""
    return set(open_sockets() - before) if backend == "gloo" else set()


def _make_group(
    ranks: Sequence[int],
    backend: str,
    timeout_s: float,
    log: OperationLog | None,
    members: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """A group over ranks of the world, timed where there is a log; `members` are their numbers in the run."""
    timeout = timedelta(seconds=timeout_s)
    if log is not None:
        return timed_group(ranks, backend, timeout, log, members, new_group)
    return new_group(list(ranks), backend=backend, timeout=timeout)


def close_comm(comm: Comm) -> None:
    """Ends the run's groups and their threads."""
    while comm.subgroups:
        end_group(comm.subgroups.pop())
    if comm.with_servers is not None:
        end_group(comm.with_servers)
    if not comm.serves:
        end_group(comm.group)
        dist.destroy_process_group(comm.control)


def broadcast_from_rank_0(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Overwrites each tensor with rank 0's, one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for members in by_dtype.values():
        sizes = [member.numel() for member in members]
        if comm.rank == 0:
            flat = torch.cat([member.reshape(-1) for member in members])
        else:
            flat = members[0].new_empty(sum(sizes))
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=comm.group)  # Gloo does not know every type.
        if comm.rank != 0:
            parts = flat.split(sizes)
            torch._foreach_copy_(members, [part.view_as(member) for part, member in zip(parts, members, strict=True)])


@contextmanager
def from_rank_0(tensors: Sequence[Tensor], comm: Comm) -> Iterator[None]:
    """Lends every rank rank 0's values for the length of a `with`, then gives each its own back."""
    own = [tensor.detach().clone() for tensor in tensors]
    with comm.carrying(Purpose.WEIGHTS):
        broadcast_from_rank_0(tensors, comm)
    try:
        yield
    finally:
        if own:
            torch._foreach_copy_([tensor.detach() for tensor in tensors], own)

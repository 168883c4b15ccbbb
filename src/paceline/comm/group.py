"""Process groups of one run: one for the strategy's traffic, one for the training loop's own messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.control import ControlChannel
from paceline.comm.groups.checked import checked_group
from paceline.comm.groups.collective_check import CollectiveCheck, open_check
from paceline.comm.groups.local import NewGroup, local_group_factory
from paceline.comm.groups.owned import OwnedGroups
from paceline.comm.groups.timed import carrying, timed_group
from paceline.comm.messages.json_messages import as_bytes, gather_typed, receive_typed, send_typed
from paceline.measure.host import memory_id
from paceline.measure.operations import OperationLog
from paceline.measure.sockets import SocketName, connections, open_sockets
from paceline.measure.steps import Stopwatch
from paceline.records.timeline import Purpose


@dataclass(frozen=True)
class Comm:
    """Process groups of a run and this rank's number in it, for strategies: the ranks of a run are numbered from 0."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    """Group for the strategy's traffic. With a stopwatch every operation on it is timed."""
    control: ControlChannel
    """Channel for small values between steps, such as losses and counts."""
    backend: str = "gloo"
    """Backend of `group`: gloo or nccl."""
    stopwatch: Stopwatch | None = None
    """Stopwatch of this rank's steps; None if steps are not timed."""
    timeout_s: float = 120.0
    servers: int = 0
    """Number of server ranks, which keep parameters and do not train. They are numbered after the workers."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """Ranks of each host, ordered by their first rank. An emulated host counts as a host. Empty on servers."""
    owned: OwnedGroups = field(default_factory=OwnedGroups)
    """All groups of the run and their sockets, for counting traffic."""
    _group_with_servers: dist.ProcessGroup | None = None
    _check: CollectiveCheck | None = None
    """Check of collectives, if the user wants it."""
    _subgroup_numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for the names of subgroups, the same on all ranks."""
    _main_memory_groups: list[dist.ProcessGroup] = field(default_factory=list)
    """The group of `through_main_memory`, once it exists."""

    @property
    def full_group(self) -> dist.ProcessGroup:
        """Group of all workers, followed by all servers, timed like `group`, which it is if there are no servers."""
        return self.group if self._group_with_servers is None else self._group_with_servers

    @property
    def is_server(self) -> bool:
        """Whether this rank keeps parameters and does not train."""
        return self.rank >= self.world_size

    def subgroup(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Create a group of some of the run's ranks. Its operations are timed like those of `group`.

        Every rank of the run must call this, as with `torch.distributed.new_group`. Ranks outside the group get
        `GroupMember.NON_GROUP_MEMBER`. `close_comm` destroys the group.
        """
        members = sorted(ranks)
        in_world = [dist.get_global_rank(self.group, rank) for rank in members]
        make: NewGroup = dist.new_group
        if self.world_size < dist.get_world_size():
            make = local_group_factory(f"{self.group.group_name}-{next(self._subgroup_numbers)}")
        before = open_sockets()
        group = _make_group(in_world, backend or self.backend, self.timeout_s, self._log, self._check, members, make)
        if self.rank in members:
            self.owned.add(group, _sockets_since(before, backend or self.backend))
        return group

    def through_main_memory(self) -> Comm:
        """Return a `Comm` of the same ranks that sends tensors in main memory, which NCCL does not support.

        Every worker must call this. Under Gloo on a CPU, it is this object itself.
        """
        if self.backend == "gloo" and self.device.type == "cpu":
            return self
        if self.backend != "gloo" and not self._main_memory_groups:
            self._main_memory_groups.append(self.subgroup(range(self.world_size), backend="gloo"))
        (group,) = self._main_memory_groups or [self.group]
        return replace(self, group=group, backend="gloo", device=torch.device("cpu"))

    @property
    def step(self) -> int | None:
        """Number of the current step; None if operations are not recorded."""
        return None if self._log is None else self._log.step

    def on_behalf_of(self, step: int | None) -> AbstractContextManager[None]:
        """Attribute operations that this thread starts inside the `with` block to a step, which may have ended."""
        return nullcontext() if self._log is None or step is None else self._log.on_behalf_of(step)

    def idle(self) -> AbstractContextManager[None]:
        """Record that the compute thread is idle inside the `with` block, waiting for operations of another thread."""
        return nullcontext() if self._log is None else self._log.idle()

    def carrying(self, purpose: Purpose) -> AbstractContextManager[None]:
        """Record what operations inside the `with` block carry, if not gradients."""
        return carrying(self.group, purpose)

    @property
    def is_timed(self) -> bool:
        """Whether operations are recorded."""
        return self._log is not None

    @property
    def _log(self) -> OperationLog | None:
        return None if self.stopwatch is None else self.stopwatch.operations


def open_comm(
    ranks: Sequence[int],
    *,
    device: torch.device,
    backend: str,
    timeout_s: float,
    stopwatch: Stopwatch | None = None,
    servers: Sequence[int] = (),
    check_collectives: bool = False,
) -> Comm | None:
    """Create the groups of a run among `ranks` of the world. All ranks call this; it returns None on other ranks.

    If the stopwatch has an operation log, the strategy's operations are recorded there. `servers` are further ranks,
    which do not train; they are not members of `group` and `control`, and have no stopwatch. With `check_collectives`,
    ranks compare every operation before it runs.
    """
    check = open_check() if check_collectives and dist.get_world_size() > 1 else None
    log = None if stopwatch is None else stopwatch.operations
    before = open_sockets()
    group = _make_group(ranks, backend, timeout_s, log, check)
    sockets = _sockets_since(before, backend)
    control = _make_group(ranks, "gloo", timeout_s, None, check)
    before = open_sockets()
    with_servers = _make_group([*ranks, *servers], "gloo", timeout_s, log, check) if servers else None
    sockets_to_servers = _sockets_since(before, "gloo") if servers else frozenset()
    rank, is_worker = dist.get_rank(), dist.get_rank() in ranks
    if rank not in (*ranks, *servers):
        return None
    owned, channel = OwnedGroups(), ControlChannel(control, log)
    if is_worker:
        owned.add(control)
        owned.add(group, sockets)
    if with_servers is not None:
        owned.add(with_servers, sockets_to_servers)
    comm = Comm(
        rank=[*ranks, *servers].index(rank),
        world_size=len(ranks),
        device=device,
        group=group,
        control=channel,
        backend=backend,
        stopwatch=stopwatch if is_worker else None,
        timeout_s=timeout_s,
        servers=len(servers),
        hosts=group_by_host(gather_typed(memory_id(), str, channel)) if is_worker else (),
        owned=owned,
        _group_with_servers=with_servers,
        _check=check,
    )
    if servers:
        owned.server_connections.update(_server_connections(comm))
    return comm


def group_by_host(memory_ids: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, ordered by their first rank, given each rank's `memory_id`."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(memory_ids):
        hosts.setdefault(host, []).append(rank)
    return tuple(tuple(members) for members in hosts.values())


def _server_connections(comm: Comm) -> dict[tuple[str, str], int]:
    """Send the connections of all servers to the workers, which count bytes for both; empty on servers."""
    group, found = comm.full_group, dict[tuple[str, str], int]()
    if comm.is_server:
        own = [(connection.local, connection.remote) for connection in connections(comm.owned.sockets)]
        for rank in range(comm.world_size):
            send_typed(own, rank, group)
        return found
    for server in range(comm.world_size, comm.world_size + comm.servers):
        found |= dict.fromkeys(receive_typed(list[tuple[str, str]], server, group), server)
    return found


def _sockets_since(before: frozenset[SocketName], backend: str) -> frozenset[SocketName]:
    """Return the sockets of a new group. Only for Gloo: NCCL connects ranks later, at its first operation."""
    return open_sockets() - before if backend == "gloo" else frozenset()


def _make_group(
    ranks: Sequence[int],
    backend: str,
    timeout_s: float,
    log: OperationLog | None,
    check: CollectiveCheck | None = None,
    members: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """Create a group of ranks of the world, timed if there is a log, and checked if there is a check.

    `members` are the ranks of the run.
    """
    timeout = timedelta(seconds=timeout_s)
    group = new_group(list(ranks), backend=backend, timeout=timeout)
    if check is not None:
        group = checked_group(ranks, group, timeout, check, members, new_group)
    if log is not None:
        group = timed_group(ranks, group, timeout, log, members, new_group)
    return group


def close_comm(comm: Comm) -> None:
    """Destroy the run's groups and their threads."""
    comm.owned.destroy()


def broadcast_from_rank_0(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Overwrite each tensor with rank 0's, with one broadcast. Every rank must pass tensors of the same layout."""
    size = sum(tensor.nbytes for tensor in tensors)
    if not size or comm.world_size == 1:  # NCCL takes 2.8 s to set up a communicator, even for one rank.
        return
    message = torch.empty(size, dtype=torch.uint8, device=comm.device)  # Gloo does not support every dtype.
    if comm.rank == 0:
        pack_bytes(tensors, message)
    dist.broadcast(message, group_src=0, group=comm.group)
    if comm.rank != 0:
        unpack_bytes(message, tensors)


def pack_bytes(tensors: Sequence[Tensor], message: Tensor) -> None:
    """Copy the bytes of all tensors, of any types and on any devices, one after the other into a message."""
    parts = message.split([tensor.nbytes for tensor in tensors])
    torch._foreach_copy_(list(parts), [as_bytes(tensor.detach().contiguous()) for tensor in tensors])


def unpack_bytes(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with the bytes of a message that `pack_bytes` made of tensors of the same layout."""
    parts = message.split([tensor.nbytes for tensor in tensors])
    dense = [tensor.detach().is_contiguous() for tensor in tensors]
    torch._foreach_copy_(
        [as_bytes(tensor.detach()) for tensor, is_dense in zip(tensors, dense, strict=True) if is_dense],
        [part for part, is_dense in zip(parts, dense, strict=True) if is_dense],
    )
    for tensor, part, is_dense in zip(tensors, parts, dense, strict=True):
        if not is_dense:
            tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@contextmanager
def from_rank_0(tensors: Sequence[Tensor], comm: Comm) -> Iterator[None]:
    """Give every rank rank 0's values inside the `with` block, and restore its own values after it."""
    own = [tensor.detach().clone() for tensor in tensors]
    with comm.carrying(Purpose.WEIGHTS):
        broadcast_from_rank_0(tensors, comm)
    try:
        yield
    finally:
        if own:
            torch._foreach_copy_([tensor.detach() for tensor in tensors], own)

"""Process groups that a run has created, and their sockets: for counting traffic, and for closing."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.comm.groups.delegating import destroy_group, inner_groups
from paceline.measure.sockets import SocketName


class OwnedGroups:
    """Process groups of a run that contain this rank."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self.sockets: set[SocketName] = set()
        """Sockets of the groups that carry the strategy's traffic, and nothing else."""
        self.server_connections: dict[tuple[str, str], int] = {}
        """On workers: the server rank that owns each connection, by its local and remote address."""

    def add(self, group: dist.ProcessGroup, sockets: frozenset[SocketName] = frozenset()) -> None:
        """Add a group that contains this rank, with the sockets that Gloo opened for it if it carries the traffic."""
        self._groups.append(group)
        self.sockets |= sockets

    def with_inner_groups(self) -> set[dist.ProcessGroup]:
        """Return all groups, including the groups inside them."""
        return {inner for group in self._groups for inner in inner_groups(group)}

    def destroy(self) -> None:
        """Destroy all groups and their threads, the last one first, unless the program has destroyed the world."""
        while self._groups:
            group = self._groups.pop()
            if group in distributed_c10d._world.pg_map:
                destroy_group(group)

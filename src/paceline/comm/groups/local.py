"""Process groups that are created by their members alone, for runs that do not use all ranks of the world."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

NewGroup = Callable[..., dist.ProcessGroup]
"""Signature of `torch.distributed.new_group`: ranks, `backend`, `timeout` and `pg_options`."""


def local_group_factory(name: str) -> NewGroup:
    """Return a `new_group` that only the members of a group call. Each factory of a world needs its own name.

    `new_group(use_local_synchronization=True)` is not enough. It may reuse the name of a destroyed group, and with it
    the addresses of that group's members, which are still in the store.
    """
    numbers = itertools.count()

    def new_group(ranks: Sequence[int], *, backend: str, timeout: timedelta, pg_options: Any = None) -> Any:
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        world = distributed_c10d._world
        _, store = world.pg_map[distributed_c10d._get_default_group()]
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            f"{name}-{next(numbers)}",  # type: ignore[arg-type]
            backend_options=pg_options,
            timeout=timeout,
        )
        world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
        return group

    return new_group

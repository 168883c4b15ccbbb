"""Process groups that only their members make: for runs in which not every rank of the world takes part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

NewGroup = Callable[..., dist.ProcessGroup]
"""As `torch.distributed.new_group`: ranks, `backend`, `timeout` and `pg_options`."""


def local_maker(name: str) -> NewGroup:
    """Makes groups without the ranks that are not in them. No two makers of a world may have the same name.

    `new_group(use_local_synchronization=True)` would do, but it may give a group the name of one that has ended, and
    with it the addresses of that one's members, which are still in the store.
    """
    numbers = itertools.count()

    def new_group(ranks: Sequence[int], *, backend: str, timeout: timedelta, pg_options: Any = None) -> Any:
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        known = distributed_c10d._world
        _, store = known.pg_map[distributed_c10d._get_default_group()]
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
        known.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
        return group

    return new_group

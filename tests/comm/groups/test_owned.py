"""Groups of a run: all are known, those of the strategy have sockets, and none is left after closing."""

from __future__ import annotations

import torch.distributed as dist

from comm.groups.test_timed import open_timed
from paceline.comm import Comm, close_comm
from paceline.comm.groups.timed import TimedGroup
from ranks import SIZE, Pool


def use_groups(_: Comm) -> dict[str, bool | int]:
    world = dist.distributed_c10d._world.pg_map
    before = set(world)
    comm = open_timed(SIZE)
    assert comm is not None
    assert isinstance(comm.group, TimedGroup)
    sockets = len(comm.owned.sockets)
    subgroup = comm.subgroup([0, 1])
    groups = comm.owned.with_inner_groups()
    found = {
        "all are known": groups == set(world) - before,
        "timed and inner": {comm.group, comm.group.inner, comm.control.group} <= groups,
        "subgroup": subgroup in groups,
        "sockets": sockets,
        "sockets of the subgroup": len(comm.owned.sockets) - sockets,
    }
    close_comm(comm)
    return found | {"left": len(set(world) - before)}


def test_groups_and_sockets(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(use_groups, SIZE)):
        is_member = rank < 2
        assert found.pop("sockets") >= SIZE - 1
        assert (found.pop("sockets of the subgroup") > 0) is is_member
        assert found == {"all are known": True, "timed and inner": True, "subgroup": is_member, "left": 0}

"""Find traffic outside the run's own groups, which no timeline shows: on torch's default group and on others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.records.summary import UntrackedCounts


class UntrackedOnRank(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one rank."""

    created: list[str]
    """Names of the new groups that are not the run's."""
    operations: int
    """Operations on groups that are not the run's."""


class UntrackedTraffic:
    """Process groups and operations of torch since this object was created."""

    def __init__(self) -> None:
        self._before = _operations()

    def untracked(self, comm: Comm) -> UntrackedCounts:
        """Return the number of new groups that are not the run's, and of operations on groups that are not the run's.

        Groups are counted over all ranks; operations are those of the rank with most. Every rank calls this.
        """
        own = {_names()[group] for group in comm.owned.with_inner_groups()}
        others = {name: count for name, count in _operations().items() if name not in own}
        counts = [count - self._before.get(name, 0) for name, count in others.items()]
        found = UntrackedOnRank(created=sorted(others.keys() - self._before.keys()), operations=sum(counts))
        ranks = gather_typed(found, UntrackedOnRank, comm.control)
        created = {name for rank in ranks for name in rank.created}
        return UntrackedCounts(groups=len(created), operations=max(rank.operations for rank in ranks))


def _names() -> Mapping[dist.ProcessGroup, str]:
    return distributed_c10d._world.pg_names


def _operations() -> dict[str, int]:
    """Return the number of operations of each group so far, by name: a reference to a group would keep it alive."""
    return {name: _count(group) for group, name in _names().items()}


def _count(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # The backend does not count operations.
        return 0

"""Finds what passes by the run's own groups, and so is in no timeline: other groups, torch's default one among them."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.comm.group import Comm
from paceline.comm.texts import gather_json


class UntrackedTraffic:
    """Compares torch's groups with those that there were when it was made."""

    def __init__(self) -> None:
        self._before = _operations()

    def untracked(self, comm: Comm) -> dict[str, int]:
        """Groups made since then that the run does not know, over all ranks, and operations on such groups and older
        ones, on the rank that has most. Every rank calls it."""
        own = {_names()[group] for group in comm.own_groups}
        others = {name: count for name, count in _operations().items() if name not in own}
        counts = [count - self._before.get(name, 0) for name, count in others.items()]
        ranks = gather_json({"made": sorted(others.keys() - self._before.keys()), "operations": sum(counts)}, comm)
        made = {name for rank in ranks for name in rank["made"]}
        return {"groups": len(made), "operations": max(rank["operations"] for rank in ranks)}


def _names() -> Mapping[dist.ProcessGroup, str]:
    return distributed_c10d._world.pg_names


def _operations() -> dict[str, int]:
    """How many operations each group has had so far, by the group's name: to hold the group would keep it alive."""
    return {name: _count(group) for group, name in _names().items()}


def _count(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # A backend that does not count.
        return 0

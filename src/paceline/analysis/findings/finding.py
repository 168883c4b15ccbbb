"""One finding of an examination, and the names of ranks and workloads in findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from paceline.records.examination import RankInfo, WorkloadNeeds

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Result of one check or measurement."""

    level: Level
    topic: str
    message: str
    """Sentences on what was measured and what it means."""
    fix: str = ""
    """Action to take; empty if none is needed."""

    def to_dict(self) -> dict[str, str]:
        """Return the finding as JSON values."""
        return asdict(self)


def ranks_by(ranks: Sequence[RankInfo], key: Callable[[RankInfo], str]) -> dict[str, list[RankInfo]]:
    """Group ranks by a key."""
    found: dict[str, list[RankInfo]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def format_workload(needs: WorkloadNeeds) -> str:
    """Return the name, batch and strategy of a workload."""
    batch = "" if needs.batch is None else f" at batch {needs.batch}"
    return f"{needs.name}{batch} under {needs.strategy}"


def format_ranks(ranks: Sequence[RankInfo]) -> str:
    """Return the numbers of ranks, as "ranks 0–3", with the host name for a single rank."""
    numbers = [rank.rank for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]} ({ranks[0].host_name})"
    consecutive = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"ranks {numbers[0]}–{numbers[-1]}" if consecutive else f"ranks {', '.join(map(str, numbers))}"

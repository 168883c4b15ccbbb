"""One finding of an examination, and the formatting of numbers and ranks in findings."""

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


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as "2 ranks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(value: float) -> str:
    """Return a number of bytes in decimal units, as "1.5 GB"."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.{1 if value < 99.95 * limit else 0}f} {unit}"
    return f"{value:.0f} B"


def binary_size(value: int) -> str:
    """Return a number of bytes in binary units, as "64 MiB"."""
    for limit, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:g} {unit}"
    return f"{value} B"


def rate(bytes_per_s: float) -> str:
    """Return a bandwidth, as "1.5 GB/s"."""
    return f"{size(bytes_per_s)}/s"


def duration(value: float) -> str:
    """Return a time in s, ms or µs."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.{2 if value < 9.995 * limit else 1}f} {unit}"
    return f"{value * 1e6:.0f} µs"

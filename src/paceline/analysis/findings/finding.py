"""One finding of an examination, and how findings write numbers and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from paceline.records.examination import RankInfo, WorkloadNeeds

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked or measured."""

    level: Level
    topic: str
    what: str
    """A sentence, with its number."""
    fix: str = ""
    """What to do about it."""

    def to_dict(self) -> dict[str, str]:
        """As JSON has it."""
        return asdict(self)


def ranks_by(ranks: Sequence[RankInfo], key: Callable[[RankInfo], str]) -> dict[str, list[RankInfo]]:
    """Ranks that have something in common."""
    found: dict[str, list[RankInfo]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def trained(needs: WorkloadNeeds) -> str:
    """A workload as it was trained."""
    batch = "" if needs.batch is None else f" at batch {needs.batch}"
    return f"{needs.name}{batch} under {needs.strategy}"


def ranks_in_words(ranks: Sequence[RankInfo]) -> str:
    """Ranks by number."""
    numbers = [rank.rank for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]} ({ranks[0].host_name})"
    run = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"ranks {numbers[0]}–{numbers[-1]}" if run else f"ranks {', '.join(map(str, numbers))}"


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(value: float) -> str:
    """A number of bytes."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.{1 if value < 99.95 * limit else 0}f} {unit}"
    return f"{value:.0f} B"


def binary_size(value: int) -> str:
    """A number of bytes that was chosen as a power of two."""
    for limit, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:g} {unit}"
    return f"{value} B"


def rate(bytes_per_s: float) -> str:
    """A bandwidth."""
    return f"{size(bytes_per_s)}/s"


def duration(value: float) -> str:
    """A time, down to microseconds."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.{2 if value < 9.995 * limit else 1}f} {unit}"
    return f"{value * 1e6:.0f} µs"

"""How old gradients are when they come to a server, and what becomes of those that are too old."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Staleness:
    """How old gradients were when they came, in updates of the server since the weights they were computed with."""

    counts: Counter[int] = field(default_factory=Counter)
    damped: int = 0
    dropped: int = 0

    def add(self, other: Staleness) -> None:
        """Counts another server's too."""
        self.counts.update(other.counts)
        self.damped += other.damped
        self.dropped += other.dropped

    def summary(self) -> dict[str, Any]:
        """For a record."""
        staleness = sorted(self.counts.elements())
        return {
            "gradients": len(staleness),
            "mean": sum(staleness) / len(staleness) if staleness else None,
            "median": staleness[len(staleness) // 2] if staleness else None,
            "max": staleness[-1] if staleness else None,
            "damped": self.damped,
            "dropped": self.dropped,
            "counts": [[staleness, self.counts[staleness]] for staleness in sorted(self.counts)],
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "counts": {str(staleness): n for staleness, n in self.counts.items()},
            "damped": self.damped,
            "dropped": self.dropped,
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> Staleness:
        """The other way."""
        return cls(
            Counter({int(staleness): n for staleness, n in values["counts"].items()}),
            values["damped"],
            values["dropped"],
        )


@dataclass(frozen=True)
class StalenessBound:
    """What becomes of gradients that are too old."""

    max_staleness: int
    """In versions; 0 is no bound."""
    drops: bool

    def factor(self, staleness: int) -> float:
        """What a gradient is multiplied by: less the older it is beyond the bound, or nothing then."""
        if not self.max_staleness or staleness <= self.max_staleness:
            return 1.0
        return 0.0 if self.drops else self.max_staleness / staleness
